"""The command line's options: help, mistakes, API keys and text files in every form, packages that are not installed, docs."""

from __future__ import annotations

import argparse
import codecs
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace.prewarm
from headrace.api.config import ServerConfig
from headrace.cli import COMMANDS, main, make_parser
from headrace.cli.completion import script
from headrace.cli.keys import client_key, server_keys
from headrace.cli.serve import server_config
from headrace.config import EngineConfig
from headrace.conversation.reasoning import REASONING_FORMATS
from headrace.conversation.tool_formats import TOOL_PARSERS
from headrace.errors import ParameterError
from headrace.extras import EXTRAS
from headrace.files import decode_text, read_text
from headrace.foreign_options import is_known, plain
from headrace.foreign_values import SYNONYMS
from headrace.llm import LLM
from headrace.options import options_of
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams
from server_driver import SRC, ServerProcess

OPERATING = Path(__file__).parents[1] / "docs" / "operating.md"


def words_of(commands=COMMANDS, before=()) -> list[tuple[str, ...]]:
    """Every command, as it is typed."""
    found = [] if before == () else [before]
    for name, (_, below) in commands.items():
        found += words_of(below, (*before, name)) if isinstance(below, dict) else [(*before, name)]
    return found


def parser_of(words: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser of a command, with its options."""
    parser = make_parser()
    for word in words:
        below = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = below.choices[word]
        parser.fill()
    return parser


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action)  # type: ignore[attr-defined]


AMID_IMPORTS = """
class Interrupt:
    def find_spec(self, name, *_):
        if name == "headrace.cli.parser":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""
IN_A_CALLBACK = """
import signal, time, types, weakref
def command():
    thing = Thing()
    gone = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))  # what this raises is only printed
    del thing
    time.sleep(10)
class Thing: pass
sys.modules["headrace.cli"] = types.SimpleNamespace(main=command)
"""


@pytest.mark.parametrize("words", [["generate", "--model", "/no/where", "--prompt", "a"], ["serve", "/no/where", "--port", "0"]])
def test_an_interrupt_amid_the_import_of_numpy_comes_behind_it(words):
    code = (
        "import signal, sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n        if name == 'numpy':\n"
        f"            signal.raise_signal(signal.SIGINT)\nsys.meta_path.insert(0, Interrupt())\nsys.argv[1:] = {words!r}\n"
        "from headrace.__main__ import main\ncode = main()\nprint(code, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert (done.stdout, "Traceback" in done.stderr) == ("130 True\n", False), done.stderr


@pytest.mark.parametrize("when", [AMID_IMPORTS, IN_A_CALLBACK], ids=["amid the first imports", "in a callback"])
def test_an_interrupt_at_a_bad_time_ends_a_command_without_a_traceback(when):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["headrace"].partition(":")
    code = f"import sys\n{when}\nfrom {module} import {function}\nsys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# ------------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("words", [(), *words_of()], ids=" ".join)
def test_every_option_has_help_and_shows_its_default(words, capsys):
    parser = parser_of(words)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        name = action.option_strings[0] if action.option_strings else action.dest
        if isinstance(action, argparse._SubParsersAction):
            assert all(choice.help for choice in action._choices_actions)
            continue
        text = help_of(parser, action)
        assert action.help and len(action.help) > 5, name
        assert text.count("default") >= 1 and "default:" in text, name
        if action.nargs != 0 and not action.choices and action.option_strings and action.dest not in ("model", "url", "host", "header", "tokenizer", "n"):
            assert action.metavar and action.metavar.lower() != action.dest, f"{name}: a metavar that says what it is"
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and shown.startswith(f"usage: {' '.join(('headrace', *words))} ")
    assert all(o in shown for a in parser._actions for o in a.option_strings)


@pytest.mark.parametrize(("command", "usage"), [("pull", "headrace pull MODEL [OPTION ...]"), ("serve", "headrace serve [MODEL] [OPTION ...]")])
def test_the_usage_tells_what_must_be_given(command, usage, capsys):
    with pytest.raises(SystemExit):
        main([command, "--nothing"])
    assert f"usage: {usage}\n" in capsys.readouterr().err


def test_defaults_in_help_are_those_of_the_engine():
    parser = parser_of(("serve",))
    shown = {a.dest: help_of(parser, a) for a in parser._actions}
    for name, field in EngineConfig.__dataclass_fields__.items():
        if name in shown and field.default not in (None, ()):
            value = {True: "on", False: "off"}.get(field.default, field.default) if isinstance(field.default, bool) else field.default
            assert f"(default: {value})" in shown[name], name


def test_the_first_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^ +{name}\b", shown, re.M) for name in COMMANDS) and "bench serve" not in shown
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^ +{name}\b", shown, re.M) for name in COMMANDS["bench"][1])


# --------------------------------------------------------------------------------------------------------------- mistakes


def test_a_directory_that_is_gone_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err.startswith("headrace: the current directory is not there any more")


@pytest.mark.parametrize(
    ("line", "usage", "said"),
    [
        ("serve --prot 80", "headrace serve", "did you mean --port?"), ("serve --prot=80", "headrace serve", "did you mean --port?"),
        ("serve --gpu-layers 3", "headrace serve", "--gpu-layers"), ("generate --promt x", "headrace generate", "--prompt?"),
        ("bench serve --num-promts 3", "headrace bench serve", "--num-prompts?"), ("bench latency --bach 3", "headrace bench latency", "--batch?"),
        ("serve --rope-theta 5", "headrace serve", "(here: what config.json says"), ("serve --ctx-size 4096", "headrace serve", "(here: --max-model-len)"),
        ("serve --quantization fp8_per_tensor", "headrace serve", "(here: fp8)"), ("generate --dtype int4", "headrace generate", "invalid choice: 'int4'"),
        ("serve --kv-cache-dtype fp8_e5m2", "headrace serve", "(here: fp8)"), ("serve --quantization bitsandbytes", "headrace serve", "(here: int4, of a checkpoint of floats)"),
        ("generate --tool-call-parser x", "headrace generate", "unknown: --tool-call-parser x\n"),
        ("serve a b", "headrace serve", "unknown: b\n"), ("serve --served-model-name b c d", "headrace serve", "unknown: d\n"),
        ("serve --port x", "headrace serve", "--port"), ("sevre", "headrace", "'serve'"),
        ("bench", "headrace bench", "WHAT"), ("bench nothing", "headrace bench", "latency"), ("", "headrace", "COMMAND"),
        ('serve --api-key-file ""', "headrace serve", "--api-key-file"), ('serve --ssl-certfile ""', "headrace serve", "--ssl-certfile"),
        ('serve --api-key ""', "headrace serve", "--api-key"), ('serve ""', "headrace serve", "MODEL"), ('serve --host " "', "headrace serve", "--host"), ('serve --model ""', "headrace serve", "--model"),
    ],
)  # fmt: skip
def test_options_that_do_not_exist_get_their_own_commands_usage(capsys, line, usage, said):
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
    with pytest.raises(SystemExit) as end:
        main(words)
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and len(err.splitlines()) <= 4
    assert err.startswith(f"usage: {usage} ") and f"{usage}: error: " in err


# what vLLM and SGLang call a value, and what it is here
SAME_VALUES = [
    ("dtype", "half", "float16"), ("dtype", "float", "float32"), ("dtype", "fp16", "float16"), ("dtype", "BFloat16", "bfloat16"),
    ("kv_cache_dtype", "fp8_e4m3", "fp8"), ("quantization", "AWQ", "awq"), ("quantization", "Compressed_Tensors", "compressed-tensors"),
    ("quantization", "auto_gptq", "gptq"), ("load_format", "runai_streamer", "safetensors"), ("attention_backend", "TRITON_ATTN", "triton"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value", "ours"), SAME_VALUES)
def test_a_value_that_means_the_same_is_taken_wherever_it_stands(tmp_path, monkeypatch, option: str, value: str, ours: str):
    flag = "--" + option.replace("_", "-")
    assert getattr(EngineConfig(**{option: value}), option) == ours
    parser = make_parser()
    assert getattr(parser.parse_args(["serve", flag, value]), option) == ours
    (tmp_path / "options.yaml").write_text(f"{option}: {value}\n")
    assert getattr(parser.parse_args(["serve", "--config", str(tmp_path / "options.yaml")]), option) == ours
    monkeypatch.setenv("HEADRACE_" + option.upper(), value)
    assert getattr(parser.parse_args(["serve"]), option) == ours


def test_help_tells_what_else_a_value_is_called():
    parser = parser_of(("serve",))
    shown = {a.dest: help_of(parser, a) for a in parser._actions}
    assert "half and fp16 for float16, float and fp32 for float32" in shown["dtype"] and "fp8_e4m3 for fp8" in shown["kv_cache_dtype"]
    for option, others in SYNONYMS.items():
        described = next(o for o in (*options_of(EngineConfig), *options_of(ServerConfig)) if o.name == option)
        taken = described.choices or {**TOOL_PARSERS, **REASONING_FORMATS}
        assert set(others.values()) <= set(taken) and not set(others) & set(taken)


@pytest.mark.parametrize(("option", "value", "said"), [
    ("quantization", "ptpc_fp8", "one of none, fp8, .* \\(here: fp8\\)"), ("kv_cache_dtype", "fp8_e5m2", "\\(here: fp8\\)"),
    ("attention_backend", "FLASHINFER", "\\(here: auto\\)"), ("quantization", ["auto_awq"], "one of none, fp8, int8, int4, bf16, awq, .*, gguf$"),
    ("quantization", "x", "gguf$"), ("dtype", None, "float16$"), ("quantization", "None", "without the option; none decodes"),
])  # fmt: skip
def test_what_others_call_a_value_is_told_ours_wherever_it_stands(tmp_path, monkeypatch, option: str, value, said: str):
    with pytest.raises(ParameterError, match=said):
        EngineConfig(**{option: value})
    if isinstance(value, str):
        (tmp_path / "options.yaml").write_text(f"{option}: {value}\n")
        with pytest.raises(ParameterError, match=said):
            make_parser().parse_args(["serve", "--config", str(tmp_path / "options.yaml")])
        monkeypatch.setenv("HEADRACE_" + option.upper(), value)
        with pytest.raises(ParameterError, match=said):
            make_parser().parse_args(["serve"])


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("generate --prompt x --top-p 7", "--top-p"), ("generate --prompt x --max-model-len 0", "--max-model-len"),
        ("serve --port 99999", "--port"), ("bench latency --batch 4 0", "--batch"), ("bench latency --output-len 1", "--output-len"),
        ("bench all --out /no/such/dir/x", "--out"), ("chat --url x --timeout nan", "--timeout"), ("chat --url http://x --api-key a\nb", "--api-key"),
        ("bench serve --extra-body 5", "--extra-body"), ("generate --prompt \udcff", "command line"),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_by_its_options_name(capsys, line, option):
    assert main(line.split(" ")) == 1
    err = capsys.readouterr().err
    assert err.startswith("headrace: ") and f"{option}: got " in err.replace(", --port", "") and "allowed: " in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------------ files


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\0"), max_size=50), st.sampled_from(["", "\ufeff"]))
def test_a_text_file_is_its_text_with_or_without_a_mark(text, mark):
    text = text.removeprefix("\ufeff")
    assert decode_text((mark + text).encode()) == text
    assert decode_text((mark + text.replace("\n", "\r\n")).encode()) == text


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=50), st.sampled_from(["utf-16", "utf-32", "utf-16-le", "utf-16-be"]))
def test_other_encodings_are_never_taken_for_utf_8(text, coding):
    data = text.encode(coding)
    try:
        found = decode_text(data)
    except ValueError:
        return
    assert "\0" not in found and codecs.BOM_UTF16_LE not in data[:2]  # two bytes that happen to be a text


BAD_FILES = {
    "UTF-16": "hello\n".encode("utf-16"), "UTF-16 without a mark": "hello\n".encode("utf-16-le"), "UTF-32": "hello\n".encode("utf-32"),
    "Latin-1": "grün\n".encode("latin-1"), "binary": bytes(range(256)),
}  # fmt: skip
FILE_OPTIONS = {
    "--prompt-file": ["generate"], "--api-key-file": ["serve", "--port", "0"], "--chat-template": ["serve", "--port", "0"],
    "--dataset-path": ["bench", "serve", "--dataset-name", "custom"], "--config": ["bench", "latency"],
}  # fmt: skip


@pytest.mark.parametrize("kind", [*BAD_FILES, "directory", "missing"])
def test_files_that_are_no_text_are_named(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(BAD_FILES[kind])
    with pytest.raises(ParameterError) as error:
        read_text("--prompt-file", str(path))
    assert error.value.field == "--prompt-file" and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("option", sorted(set(FILE_OPTIONS) - {"--api-key-file", "--chat-template"}))
def test_every_option_with_a_file_names_it(capsys, tmp_path, option):
    path = tmp_path / "file"
    path.write_bytes(BAD_FILES["UTF-16"])
    words = FILE_OPTIONS[option]
    if "serve" in words:  # the file is read when the server has answered
        from headrace_bench.workload import from_file

        with pytest.raises(ParameterError, match=f"{option}.*UTF-16"):
            list(from_file(str(path), None, 5))
        path.write_text('\ufeff{"prompt": "a\u2028b"}\n')
        assert [p.prompt for p in from_file(str(path), None, 5)] == ["a\u2028b"]  # a line ends at its line break only
    else:
        assert main([*words, option, str(path)]) == 1
        err = capsys.readouterr().err
        assert option in err and str(path) in err and "UTF-16" in err


# ------------------------------------------------------------------------------------------------------------------- keys


def keys(file: Path | None = None, *given: str) -> tuple[str, ...]:
    return server_keys(argparse.Namespace(api_key=list(given) or None, api_key_file=None if file is None else str(file)))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\ntwo\n", ("one", "two")), (b"one", ("one",)), (b"\r\none  \r\n\r\n\ttwo\r\n", ("one", "two")), (b"\xef\xbb\xbfone\n", ("one",)),
        (b"# for Ann\none\n  # for Bob\ntwo", ("one", "two")), ("schlüssel\n".encode(), ("schlüssel",)), (b"one#1\n", ("one#1",)),
        (b"", None), (b"\n \n\t\r\n", None), (b"\xef\xbb\xbf", None), (b"# one\n", None), (b"one two\n", None), (b"one\nt\x01wo\n", None),
        (b"k\xfcy\n", None), ("one\n".encode("utf-16"), None), (b"one\0\n", None),
    ],
)  # fmt: skip
def test_a_key_file_gives_its_keys_or_ends_the_start(tmp_path, monkeypatch, data, expected):
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    file = tmp_path / "keys"
    file.write_bytes(data)
    if expected is not None:
        assert keys(file) == expected
        assert keys(file, "more") == ("more", *expected)
    else:
        for more in ((), ("more",)):  # another source does not make up for it
            with pytest.raises(ParameterError) as error:
                keys(file, *more)
            assert "--api-key-file" in error.value.field and "one" not in str(error.value).replace("at least one", "")


@pytest.mark.parametrize("bad", ["", " ", "\t", "a b", "a\n", "\x7f"])
def test_an_empty_key_is_not_no_key(monkeypatch, bad):
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    assert keys() == ()
    with pytest.raises(ParameterError, match="--api-key"):
        keys(None, bad)
    with pytest.raises(ParameterError, match="api_keys"):
        ServerConfig(api_keys=("good", bad))
    monkeypatch.setenv("HEADRACE_API_KEY", bad)
    for others in ((), ("good",)):
        with pytest.raises(ParameterError, match="HEADRACE_API_KEY"):
            keys(None, *others)
    monkeypatch.setenv("HEADRACE_API_KEY", "fine")
    assert keys() == ("fine",) and keys(None, "good") == ("good", "fine")


def test_a_server_that_stands_for_vllm_asks_for_its_key(monkeypatch):
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert keys() == ("secret",)
    assert keys(None, "good") == ("good",)  # as there: it counts where no other is given
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ParameterError, match="VLLM_API_KEY"):  # nor does it run open by mistake
        keys()


def test_a_client_takes_its_key_from_the_option_or_the_environment(monkeypatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "fine")
    assert client_key(argparse.Namespace(api_key=None)) == "fine" and client_key(argparse.Namespace(api_key="mine")) == "mine"
    monkeypatch.setenv("HEADRACE_API_KEY", " ")
    assert client_key(argparse.Namespace(api_key=None)) is None
    with pytest.raises(ParameterError):
        client_key(argparse.Namespace(api_key="a b"))


@pytest.mark.parametrize(
    ("words", "kept"),
    [("", 64 * 2**20), ("--responses-store-bytes 5", 5), ("--responses-store-bytes 0", 0), ("--api-processes 2", 0),
     ("--api-processes 2 --responses-store-bytes 0", 0), ("--api-processes 2 --responses-store-bytes 5", None), ("--responses-store-bytes -1", None)],
)  # fmt: skip
def test_several_processes_keep_no_responses(words, kept):
    args = make_parser().parse_args(["serve", *words.split()])
    if kept is None:
        with pytest.raises(ParameterError, match=r"responses.store.bytes"):
            server_config(args)
    else:
        assert server_config(args).responses_store_bytes == kept


@pytest.mark.parametrize("origin", ["http://a", "https://a.b:8443", "*", "null", "app://obsidian.md"])
def test_origins(origin):
    ServerConfig(cors_origins=(origin,))


@pytest.mark.parametrize("origin", ["", "http://a/", "a.b", "http://a/b", "http://", "http://a b", "https://x@a"])
def test_origins_that_no_browser_sends_are_refused(origin):
    with pytest.raises(ParameterError, match="cors_origins"):
        ServerConfig(cors_origins=("http://a", origin))


def test_a_real_server_asks_for_the_keys_of_its_file_and_environment(model, tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# two of them\nfrom-file\n\nschlüssel\n")
    monkeypatch.setenv("HEADRACE_API_KEY", "from-environment")
    with ServerProcess(model, "--no-standby", "--api-key", "from-option", "--api-key-file", str(file)) as server:
        status = {
            key: server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()}).status_code
            for key in ("from-option", "from-file", "schlüssel", "from-environment", "from", "# two of them", "two", "other")
        }
        assert status == dict(zip(status, [200] * 4 + [401] * 4, strict=True))
        assert server.http.get("/v1/models").status_code == 401 and server.http.get("//v1/models/").status_code == 401
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(("option", "value"), [("--api-key-file", b""), ("--api-key-file", b"# none\n"), ("HEADRACE_API_KEY", b"")])
def test_a_server_that_was_to_have_a_key_does_not_start_without(model, tmp_path, monkeypatch, capsys, option, value):
    monkeypatch.setattr("headrace.engine.client.EngineClient.start", lambda self: pytest.fail("it would have listened"))
    file = tmp_path / "keys"
    file.write_bytes(value)
    if option == "HEADRACE_API_KEY":
        monkeypatch.setenv(option, "")
    words = ["--api-key-file", str(file)] if option == "--api-key-file" else []
    assert main(["serve", model, "--device", "cpu", "--port", "0", *words]) == 1
    assert option in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- other packages


def without(modules: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process in which these modules are not to be had."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from headrace.cli import main; sys.exit(main({list(words)!r}))"
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=100)


def test_a_missing_package_names_the_command_that_adds_it():
    done = without(["matplotlib"], "bench", "serve", "--url", "http://127.0.0.1:9", "--plot", "x.svg")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "matplotlib" in done.stderr and "pip install 'headrace[plot]'" in done.stderr


@pytest.mark.parametrize(
    ("module", "words"), [("msgspec", ["bench", "serve", "--url", "http://127.0.0.1:9"]), ("zmq", ["serve", "--port", "0"]), ("uvicorn", ["serve", "--port", "0"])]
)  # fmt: skip
def test_a_missing_dependency_is_no_traceback(module, words):
    done = without([module], *words)
    assert done.returncode == 1 and f"{module} is not installed" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_what_needs_no_extra_runs_without():
    done = without([*EXTRAS, "uvloop"], "bench", "serve", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and "cannot be reached" in done.stderr and "Traceback" not in done.stderr
    assert without([*EXTRAS, "uvloop"], "serve", "--help").returncode == 0


def test_grammars_without_their_package(monkeypatch, model):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(model, device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
        with pytest.raises(ParameterError, match="pip install llguidance"):
            llm.generate(["x"], params, use_tqdm=False)
        assert llm.generate(["x"], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        assert any(re.match(rf"{module}\b", line) for line in project[extra]), module
    assert project["serve"] == project["structured"] == []  # names that were there once


# ------------------------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("be", {"bench"}), ("bench l", {"latency"}), ("serve --max-num", {"--max-num-seqs", "--max-num-batched-tokens"}), ("serve --dtype b", {"bfloat16"}), ("completion f", {"fish"})],
)  # fmt: skip
def test_bash_completes(tmp_path, typed, offered):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    file = tmp_path / "headrace"
    file.write_text(script("bash"))
    words = ["headrace", *typed.split(" ")]
    ask = f'source {file}; COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _shtab_headrace; printf "%s\\n" "${{COMPREPLY[@]}}"'
    assert set(subprocess.run([bash, "--norc", "-c", ask], capture_output=True, text=True, check=True, timeout=30).stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_that_knows_the_options(shell):
    made = script(shell)
    assert "max-num-batched-tokens" in made and "simulate" in made


# ---------------------------------------------------------------------------------------------------------------- prewarm


class Driver:
    """In the place of libcuda."""

    def __init__(self, result: int):
        self.result, self.retained, self.done = result, 0, threading.Event()

    def cuInit(self, flags: int) -> int:
        if self.result:
            self.done.set()
        return self.result

    def cuDevicePrimaryCtxRetain(self, context, device: int) -> int:
        self.retained += 1
        self.done.set()
        return 0


@pytest.mark.parametrize(("device", "result", "retained"), [("cuda", 0, 1), ("auto", 0, 1), ("cuda", 100, 0), ("cpu", 0, 0), ("mps", 0, 0)])
def test_a_context_is_made_ahead_where_there_is_a_card(monkeypatch, device, result, retained):
    driver, asked = Driver(result), threading.Event()
    monkeypatch.setattr(headrace.prewarm, "is_installed", lambda module: module == "triton")
    monkeypatch.setattr(headrace.prewarm.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(headrace.prewarm, "_ask_triton", lambda driver, card: asked.set())
    headrace.prewarm.prewarm(device)
    wanted = device in ("auto", "cuda")
    assert driver.done.wait(10 if wanted else 0) == wanted and asked.wait(10 if wanted else 0) == wanted
    assert driver.retained == retained


def test_nothing_is_made_ahead_without_a_driver_or_triton(monkeypatch):
    def no_driver(name: str):
        raise OSError("libcuda.so.1: cannot open shared object file")

    started = []
    monkeypatch.setattr(headrace.prewarm.threading, "Thread", lambda **options: started.append(options))
    monkeypatch.setattr(headrace.prewarm.ctypes, "CDLL", no_driver)
    headrace.prewarm.prewarm("cuda")
    monkeypatch.setattr(headrace.prewarm.ctypes, "CDLL", lambda name: Driver(0))
    monkeypatch.setattr(headrace.prewarm, "is_installed", lambda module: False)
    headrace.prewarm.prewarm("cuda")
    assert not started


def test_a_triton_that_keeps_its_questions_elsewhere_stops_nothing(monkeypatch):
    """Each thread ends without a word: what it did not find is asked again where it is needed."""
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    monkeypatch.setattr(headrace.prewarm, "is_installed", lambda module: module == "triton")
    monkeypatch.setattr(headrace.prewarm.ctypes, "CDLL", lambda name: Driver(0))
    before, loud = set(threading.enumerate()), []
    monkeypatch.setattr(threading, "excepthook", loud.append)
    headrace.prewarm.prewarm("cuda")
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert not loud


# ------------------------------------------------------------------------------------------------------------------- docs


def defaults() -> dict[str, str]:
    """--option -> what `headrace serve --help` says of its default."""
    parser = parser_of(("serve",))
    found = {}
    for action in parser._actions:
        if shown := re.search(r"default: (.*)\)", help_of(parser, action)):
            found |= dict.fromkeys(action.option_strings or [action.metavar], shown[1])
    return found


def test_the_operators_tables_have_the_defaults_of_help():
    known = defaults()
    rows = re.findall(r"^\| ((?:`(?:--[a-z-]+|MODEL)`(?:, )?)+) \| ([^|]*) \|", OPERATING.read_text(), re.M)
    assert len(rows) > 25
    for names, default in rows:
        for name in re.findall(r"`([^`]*)`", names):
            assert known[name] == default.strip("`"), name


def test_defaults_in_the_operators_text_are_those_of_help():
    known = defaults()
    found = re.findall(r"`(--[a-z-]+)` \((none|[0-9][^)]*)\)", OPERATING.read_text())
    assert len(found) > 8
    for name, default in found:
        assert known[name].removesuffix(".0") == default.split(" ")[0], name


def test_options_that_documents_name_exist():
    known = {o for words in words_of() for a in parser_of(words)._actions for o in a.option_strings}
    others = {"--no-deps", "--version", "--help", "--build-arg", "--shm-size", "--ipc"}
    for document in (OPERATING, OPERATING.parent / "tour.md", OPERATING.parent / "using.md", OPERATING.parents[1] / "README.md"):
        strange = set(re.findall(r"`(--[a-z][a-z-]+)", document.read_text())) - known - others
        assert not {option for option in strange if not is_known(plain(option))}, document.name  # vLLM's may be named
