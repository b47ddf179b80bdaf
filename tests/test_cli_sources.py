"""Where options come from: command line, HEADRACE_* variables, a YAML file, defaults; and that each is described once."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.config import ServerConfig
from headrace.cli import main, make_parser
from headrace.cli.options import engine_options
from headrace.cli.serve import server_config
from headrace.cli.serve_options import ModelsOptions, ServeOptions
from headrace.config import EngineConfig
from headrace.distributed.autoscaler import ScalingConfig
from headrace.engine.supervision import SupervisionConfig
from headrace.errors import HeadraceError, ParameterError
from headrace.options import Option, options_of

CLASSES = (EngineConfig, ServerConfig, ServeOptions, SupervisionConfig, ScalingConfig, ModelsOptions)
OPTIONS = [(cls, o) for cls in CLASSES for o in options_of(cls)]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("HEADRACE_API_KEY", "HEADRACE_CACHE"):
        monkeypatch.delenv(name, raising=False)


def parsed(*words: str, command: str = "serve"):
    return make_parser().parse_args([command, *words])


def file_with(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "o.yaml"
    path.write_text(text)
    return ["--config", str(path)]


# ------------------------------------------------------------------------------------------------------------- precedence


@pytest.mark.parametrize("flag", [None, "3"])
@pytest.mark.parametrize("variable", [None, "5"])
@pytest.mark.parametrize("in_file", [None, "7"])
def test_flag_before_variable_before_file_before_default(monkeypatch, tmp_path, flag, variable, in_file):
    words = [] if in_file is None else file_with(tmp_path, f"max-num-seqs: {in_file}\n")
    if flag is not None:
        words += ["--max-num-seqs", flag]
    if variable is not None:
        monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", variable)
    args = parsed(*words)
    given = next((v for v in (flag, variable, in_file) if v is not None), None)
    assert args.max_num_seqs == (None if given is None else int(given))
    assert engine_options(args) == ({} if given is None else {"max_num_seqs": int(given)})


@pytest.mark.parametrize(("first", "value"), [("--enforce-eager", True), ("--no-enforce-eager", False), (None, True)])
def test_a_switch_can_be_turned_on_and_off_again(monkeypatch, tmp_path, first, value):
    monkeypatch.setenv("HEADRACE_ENFORCE_EAGER", "1")
    assert parsed(*([first] if first else []), *file_with(tmp_path, "enforce-eager: off")).enforce_eager is value


def test_lists_are_replaced_and_not_added_to(monkeypatch, tmp_path):
    file = file_with(tmp_path, "served-model-name: [a, b]\n")
    assert server_config(parsed(*file)).served_model_names == ("a", "b")
    monkeypatch.setenv("HEADRACE_SERVED_MODEL_NAME", "c,d")
    assert server_config(parsed(*file)).served_model_names == ("c", "d")
    assert server_config(parsed(*file, "--served-model-name", "e")).served_model_names == ("e",)


def test_the_file_may_be_named_by_a_variable_and_has_options_of_its_command_only(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CONFIG", file_with(tmp_path, "temperature: 0\nmodel: x\nstop: [a]\n")[1])
    args = parsed("--prompt", "p", command="generate")
    assert (args.temperature, args.model, args.stop) == (0, "x", ["a"])
    with pytest.raises(HeadraceError, match=r"o\.yaml: temperature: no such option of headrace serve"):
        parsed()
    assert server_config(parsed(*file_with(tmp_path, "tool_parser: none"))).tool_parser is None
    assert parsed(*file_with(tmp_path, "# nothing\n")).sources.keys() == {"config_file"}


def test_kernels_are_compiled_for_what_the_servers_file_says(tmp_path):
    """The file that a deployment has was refused for its port."""
    args = parsed(*file_with(tmp_path, "port: 9000\nmodel: x\nmax_num_seqs: 8\napi-key-file: k\n"), command="compile")
    assert engine_options(args) == {"model": "x", "max_num_seqs": 8}
    of_vllm = "tp: 2\nmodel: x\ntool-call-parser: hermes\napi-server-count: 2\nallowed-origins: ['*']\ndisable-log-stats: true\n"
    assert engine_options(parsed(*file_with(tmp_path, of_vllm), command="compile")) == {"model": "x", "tensor_parallel_size": 2}
    for text, words in (("prot: 9000", "prot: no such option of headrace compile"), ("models: [{model: x}]", "models: no such option")):
        with pytest.raises(HeadraceError, match=words):
            parsed(*file_with(tmp_path, text), command="compile")


def test_values_are_texts_in_a_file_too(tmp_path):
    args = parsed(*file_with(tmp_path, "revision: 0123\nhost: 1:20\nserved-model-name: [1e3, no]\nmax-itl-ms: 1e2\nstandby: No\nmodel: null\n"))
    assert (args.revision, args.host, args.served_model_names, args.max_itl_ms, args.standby, args.model) == ("0123", "1:20", ["1e3", "no"], 100, False, "null")


def test_a_named_model_comes_before_the_files(monkeypatch, tmp_path, capsys):
    assert main(["serve", "./mine", "--port", "0", *file_with(tmp_path, "model: ./theirs")]) == 1
    assert "directory mine does not exist" in capsys.readouterr().err


def test_underscores_are_dashes():
    assert parsed("--max_num_seqs=4", "--no-enable_prefix_caching").max_num_seqs == 4
    with pytest.raises(SystemExit):
        parsed("--max_nun_seqs", "4")


# --------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-model-len: 0", "o.yaml: max-model-len: got 0, allowed: an integer in [1, 16777216]"), ("max_model_len: x", "o.yaml: max_model_len: got 'x', allowed: an integer"),
        ("max-model-len: 1.5", "got '1.5', allowed: an integer"), ("max-model-len: true", "got 'true', allowed: an integer"), ("max-model-len: [1]", "got ['1'], allowed: an integer"), ("max-model-len:", "got '', allowed: an integer"),
        ("dtype: float33", "o.yaml: dtype: got 'float33', allowed: one of auto, float32"), ("host: ''", "o.yaml: host: got '', allowed: a text"),
        ("enforce-eager: 2", "got '2', allowed: true or false"), ("enforce-eager: [on]", "got ['on'], allowed: true or false"), ("served-model-name: {a: b}", "allowed: a text"), ("max-modell-len: 5", "o.yaml: max-modell-len: no such option of headrace serve (did you mean max-model-len?)"),
        ("config: x", "no such option"), ("help: x", "no such option"), ("port: 1\nport: 2", "o.yaml: port: it is there twice"), ("api_processes: 1\napi-processes: 2", "it is there twice"),
        ("- port", "a YAML file with an option"), ("port", "a YAML file with an option"), ("port: [", "a YAML file ("), ("? [a]\n: 1", "a YAML file with an option"),
        ("a: 1\n---\nb: 2", "a YAML file ("), ("port: !!python/name:os.system", "port: got ''"), ("metrics-prefix: a b", "o.yaml: metrics-prefix: got 'a b'"),
        ("gpu-memory-utilization: 1.5", "o.yaml: gpu-memory-utilization: got 1.5, allowed: a number in (0, 1]"), ("max-replicas: 3", "o.yaml: max-replicas: got 3, allowed: nothing without --ray"),
        ("models: [{model: a, max-model-len: 5, max_model_len: 6}]", "o.yaml: max_model_len: it is there twice"), ("a: " + "[" * 2000 + "]" * 2000, "not nested so deeply"),
        ("a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrstuvwx", "bcdefghijklmnopqrstuvwxy", strict=True)), "a YAML file of at most 1048576 characters"),
        ("a: &a {b: *a}", "a YAML file of at most"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_told_with_its_place(tmp_path, capsys, monkeypatch, text, said):
    monkeypatch.setattr("headrace.cli.serve.bind", lambda *_: [])  # whatever else serves on this machine
    assert main(["serve", *file_with(tmp_path, text)]) == 1
    err = capsys.readouterr().err
    assert said in err and err.startswith("headrace: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADRACE_MAX_MODEL_LEN", "0", "HEADRACE_MAX_MODEL_LEN: got 0, allowed: an integer in"), ("HEADRACE_MAX_MODEL_LEN", "", "HEADRACE_MAX_MODEL_LEN: got '', allowed: an integer"),
        ("HEADRACE_MAX_MODEL_LENGTH", "5", "HEADRACE_MAX_MODEL_LENGTH: no option has such a variable (did you mean HEADRACE_MAX_MODEL_LEN?)"),
        ("HEADRACE_PORT", "tcp", "HEADRACE_PORT: got 'tcp', allowed: an integer"), ("HEADRACE_STANDBY", "maybe", "HEADRACE_STANDBY: got 'maybe', allowed: true or false"),
        ("HEADRACE_DTYPE", "f", "HEADRACE_DTYPE: got 'f', allowed: one of auto"), ("HEADRACE_MODEL", " ", "HEADRACE_MODEL: got ' ', allowed: a text"),
        ("HEADRACE_CONFIG", "/no/such", "HEADRACE_CONFIG: got '/no/such', allowed: a file that can be read"), ("HEADRACE_CHAT_TEMPLATE", "/no/such", "HEADRACE_CHAT_TEMPLATE: got"),
        ("HEADRACE_CORS_ORIGIN", "http://a,b", "HEADRACE_CORS_ORIGIN: got 'b', allowed"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_variable_is_told_by_its_name(monkeypatch, capsys, name, value, said):
    monkeypatch.setenv(name, value)
    assert main(["serve", "--port", "0"] if name != "HEADRACE_PORT" else ["serve"]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("HEADRACE_PORT", "tcp://10.0.0.1:80"), ("HEADRACE_SERVICE_HOST", "10.0.0.1"), ("HEADRACE_SERVICE_PORT_HTTP", "80"), ("HEADRACE_PORT_80_TCP", "tcp://10.0.0.1:80"),
     ("HEADRACE_PORT_80_TCP_ADDR", "10.0.0.1"), ("HEADRACE_7B_PORT", "tcp://10.0.0.1:80"), ("HEADRACE_CACHE", "/x"), ("HEADRACE_API_PROCESSES", "2")],
)  # fmt: skip
def test_what_is_meant_for_others_is_no_mistake(monkeypatch, capsys, name, value):
    """Kubernetes' names of a service called headrace; a server's option beside another command."""
    monkeypatch.setenv(name, value)
    assert main(["generate", "--prompt", "x", "--top-p", "7"]) == 1
    assert "--top-p: got 7.0" in capsys.readouterr().err
    assert parsed().port == 8000


# ------------------------------------------------------------------------------------------------------------ description


def values(o: Option) -> st.SearchStrategy:
    """Some of its values and some that are none."""
    edges = [e for e in (o.low, o.more_than, o.high) if e is not None]
    near = [*edges, *(e - 1 for e in edges), *(e + 1 for e in edges), o.default]
    return st.one_of(st.sampled_from([*near, *(o.choices or ("x",)), None, True, float("nan"), "?", 1.5, -1]), st.integers(), st.floats())


@given(st.data())
def test_a_value_is_taken_or_refused_with_what_is_allowed(data):
    o = data.draw(st.sampled_from([o for _, o in OPTIONS if o.allowed and not o.many]))
    value = data.draw(values(o))
    try:
        o.check(value)
    except ParameterError as e:
        assert e.field == o.name and e.allowed == o.allowed and e.allowed
        return
    if value is None:
        assert o.optional
    elif o.choices:
        assert value in o.choices
    else:
        assert isinstance(value, (int, float) if o.kind is float else o.kind) and (o.kind is bool or not isinstance(value, bool))
        assert (o.low is None or value >= o.low) and (o.more_than is None or value > o.more_than) and (o.high is None or value <= o.high)


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_allowed_and_a_bad_value_is_refused_by_the_class(cls):
    cls()
    for o in options_of(cls):
        o.check(o.default)
        if o.kind in (int, float) and not o.many:
            with pytest.raises(ParameterError, match=o.name):
                dataclasses.replace(cls(), **{o.name: "x"})


def test_a_file_with_all_defaults_of_help_changes_nothing(tmp_path):
    everything = {o.key: o.default for _, o in OPTIONS if o.help and o.default not in (None, ())}
    args = parsed(*file_with(tmp_path, yaml.safe_dump(everything)))
    assert EngineConfig(**engine_options(args)) == EngineConfig() and len(args.sources) == len(everything) + 1 > 40


def test_the_page_of_options_is_that_of_the_parsers():
    docs = Path(__file__).parents[1] / "docs"
    made = subprocess.run([sys.executable, docs / "options_table.py"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert made == (docs / "options.md").read_text(), "python docs/options_table.py > docs/options.md"
