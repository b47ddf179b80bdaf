"""What other servers (vLLM, SGLang, llama.cpp) call options: a command line that was written for one of them is told ours."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from types import MappingProxyType

from headrace.foreign_values import instead_of_value

# theirs -> ours, or what there is instead
FOREIGN_FLAGS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("-m", "--model-path"), "--model"), "--tokenizer-path": "--tokenizer", "--alias": "--served-model-name",
    **dict.fromkeys(("-c", "--ctx-size", "--context-length"), "--max-model-len"),
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "--tensor-parallel-size"),
    **dict.fromkeys(("-dp", "--dp", "--dp-size"), "--data-parallel-size"),
    "-q": "--quantization",
    **dict.fromkeys(("-np", "--parallel", "--max-running-requests"), "--max-num-seqs"),
    "--mem-fraction-static": "--gpu-memory-utilization", "--chunked-prefill-size": "--max-num-batched-tokens",
    "--tool-call-parser": "--tool-parser", "--generation-config": "--override-generation-config",
    "--api-server-count": "--api-processes", "--uvicorn-log-level": "--log-level", "--kv-events-config": "--kv-events",
    **dict.fromkeys(("--lora-modules", "--lora-paths"), "--lora NAME=PATH, again for each"),
    "--allowed-origins": "--cors-origin, again for each", "--distributed-executor-backend": "--ray",
    "--speculative-config": "--speculative-method, --speculative-model, --num-speculative-tokens",
    "--disable-log-stats": "--stats-interval 0", "--enable-log-requests": "--log-level info",
    "--disable-log-requests": "only --log-level info logs requests",
    "--enable-auto-tool-choice": "tools need no option", "--jinja": "chat templates need no option",
    "--enable-lora": "--lora and --lora-dir say so", "--enable-chunked-prefill": "prompts are computed in chunks anyway",
    "--enable-reasoning": "reasoning needs no option (--reasoning-parser)",
    **dict.fromkeys(("--task", "--runner"), "each model generates and embeds"),
    **dict.fromkeys(("--guided-decoding-backend", "--structured-outputs-config"), "grammars need no option"),
    "--trust-remote-code": "no code of a model's directory is ever run",
    **dict.fromkeys(("--seed", "--random-seed"), "a request has its seed; without one each is another"),
    "--max-logprobs": "up to 20 of a position without an option", "--root-path": "a proxy in front takes its prefix away",
    "--no-enable-chunked-prefill": "prompts are computed in chunks of --max-num-batched-tokens",
    "--enable-expert-parallel": "with --tensor-parallel-size each card has whole experts anyway",
    **dict.fromkeys(
        ("--compilation-config", "--optimization-level", "-O0", "-O1", "-O2", "-O3"), "--enforce-eager alone turns graphs off"
    ),
    **dict.fromkeys(
        ("--hf-overrides", "--rope-scaling", "--json-model-override-args"), "what config.json says holds: change a copy"
    ),
    **dict.fromkeys(("--limit-mm-per-prompt", "--language-model-only"), "text alone is taken and made"),
    **dict.fromkeys(("--enable-prompt-tokens-details", "--enable-cache-report"), "usage has cached_tokens without an option"),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp"), "--tensor-parallel-size splits a model, --data-parallel-size and --ray multiply it"
    ),
    **dict.fromkeys(
        ("-ngl", "--n-gpu-layers", "--gpu-layers"), "a model is on the GPU as a whole or not at all (--device)"
    ),
    **dict.fromkeys(
        ("--cpu-offload-gb", "--swap-space"), "weights are where the model runs; narrower ones: --quantization"
    ),
})  # fmt: skip


def instead_of(word: str, known: Container[str]) -> str:
    """What to give instead of the unknown option `word`, where there are these; nothing for one that is known nowhere."""
    advice = FOREIGN_FLAGS.get(word.partition("=")[0].replace("_", "-"), "")
    flags = [part.strip("(),") for part in advice.split() if part.startswith(("--", "(--"))]
    if not advice or not all(flag in known for flag in flags):
        return ""
    return f" (here: {advice})"


def meant_by(message: str) -> str:
    """What to give instead of the value that argparse's `message` says is no choice."""
    found = re.search(r"^argument --([\w-]+): invalid choice: '([^']*)'", message)
    return instead_of_value(found[1].replace("-", "_"), found[2]) if found else ""
