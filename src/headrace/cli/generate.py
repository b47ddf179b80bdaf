"""`headrace generate`: prompts in, text out as it is made. Text goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from headrace.cli.options import add_engine_arguments, add_sampling_arguments, engine_options, sampling_params
from headrace.cli.parser import text
from headrace.cli.sources import add_config_file
from headrace.cli.streams import for_stream, holds_unicode, read_all
from headrace.errors import HeadraceError, ParameterError
from headrace.files import read_text
from headrace.prewarm import prewarm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_file(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable (default: read standard input)")
    parser.add_argument("--prompt-file", type=text, metavar="FILE", help="a file with one prompt a line")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message through the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt (with --chat)")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="print text as it is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt instead of text")
    parser.add_argument("--show-stats", action="store_true", help="end with one line of figures on stderr")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    if args.system is not None and not args.chat:
        raise ParameterError("--system", args.system, "a system message only together with --chat")
    params = sampling_params(args)  # a bad value is reported before the model is loaded
    options = engine_options(args)
    prewarm(options.get("device", "auto"))
    from headrace import LLM

    with LLM(progress=sys.stderr.isatty(), **options) as llm:
        inputs: list[Any] = list(prompts)
        if args.chat:
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            inputs = [llm.chat_prompt([*system, {"role": "user", "content": p}]) for p in prompts]
        began = time.perf_counter()
        outputs = _generate(llm, inputs, params, args)
        elapsed = time.perf_counter() - began
        if args.json:
            for prompt, output in zip(prompts, outputs, strict=True):
                print(json.dumps(as_json(prompt, output), ensure_ascii=not holds_unicode(sys.stdout)))
        if args.show_stats:
            print(stats_line(llm, outputs, elapsed, params), file=sys.stderr)
    failed = [o for output in outputs for o in output.outputs if o.finish_reason == "error"]
    for o in failed:
        print(f"headrace: {o.error}", file=sys.stderr)
    return 1 if failed else 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or [])
    if not all(prompts):
        raise ParameterError("--prompt", "", "a text that is not empty")
    if args.prompt_file is not None:
        lines = [line for line in read_text("--prompt-file", args.prompt_file).split("\n") if line]
        if not lines:
            raise ParameterError("--prompt-file", args.prompt_file, "a file with at least one line that is not empty")
        return prompts + lines
    if not prompts:
        if sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
            raise HeadraceError("there is no prompt: name one with --prompt or --prompt-file, or send one to standard input")
        prompts = [read_all()]
        if not prompts[0]:
            raise HeadraceError("there is no prompt: standard input is empty, and neither --prompt nor --prompt-file is given")
    return prompts


def _generate(llm, inputs, params, args):
    """Generate, and print: a single sample as it comes, several one after the other in their order."""
    outputs: dict[int, Any] = {}
    live = args.stream and not args.json
    printed = [""] * (len(inputs) * params.n)
    ended = [False] * len(printed)  # by the deltas: an output may be ahead of those that are still to come
    turn = 0
    for i, k, delta, output in llm.stream(inputs, params):
        outputs[i] = output
        printed[i * params.n + k] += delta.text
        ended[i * params.n + k] = delta.finish_reason is not None
        while live and turn < len(printed):
            sys.stdout.write(for_stream(printed[turn], sys.stdout))
            printed[turn] = ""
            sys.stdout.flush()
            if not ended[turn]:
                break
            sys.stdout.write("\n")
            turn += 1
    ordered = [outputs[i] for i in range(len(inputs))]
    if not args.stream and not args.json:
        for output in ordered:
            for sample in output.outputs:
                print(for_stream(sample.text, sys.stdout))
    return ordered


def as_json(prompt: str, output) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            {
                "text": o.text,
                "token_ids": o.token_ids,
                "finish_reason": o.finish_reason,
                "stop_reason": o.stop_reason,
            }
            for o in output.outputs
        ],
    }


def stats_line(llm, outputs, elapsed: float, params) -> str:
    generated = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    metrics = [output.metrics for output in outputs if output.metrics]
    count = max(len(metrics), 1)
    figures = {
        "prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs),
        "generated_tokens": generated,
        "elapsed_seconds": f"{elapsed:.3f}",
        "tokens_per_second": f"{generated / elapsed:.2f}",
        "ttft_ms": f"{1e3 * sum(m.ttft for m in metrics) / count:.2f}",
        "tpot_ms": f"{1e3 * sum(m.tpot for m in metrics) / count:.2f}",
        "device": llm.engine.device.type,
        "dtype": str(llm.engine.dtype).removeprefix("torch."),
        "weights": llm.engine.weights.replace(" ", ""),
    }
    figures |= {k: f"{v:g}" for k, v in params.resolved(llm.inputs.defaults).told().items()}  # the model's defaults among them
    return " ".join(f"{k}={v}" for k, v in figures.items())
