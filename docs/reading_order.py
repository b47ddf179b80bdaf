"""The files in the order in which to read them, with their lines: `make read`.

CORE is the way of a request from `LLM.generate` through scheduler, runner, decoder and sampler and back to its text: what must
be read to understand the engine. SETUP is what has been done by then, from a checkpoint to a running engine. CHAT is the way of
one chat request over HTTP, from the route to the kernel that reads its keys and back to the last event.

Whatever is in none of them is a wing or a leaf: it attaches at one place and can be read alone. Leaves that every request meets
are the tokenizer, the automaton of stop strings (text/markers.py), Ctrl-C put off to the end of a step (engine/interrupts.py),
and the kernels with their references in torch (of which kernels/prepare.py makes a step's rows from its plan).
"""

from __future__ import annotations

import signal
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src" / "headrace"

CORE = """
llm.py  text/inputs.py  sampling/params.py
engine/sharing.py  engine/messages.py  engine/core.py  engine/outputs.py
scheduler/request.py  scheduler/plan.py  scheduler/config.py  scheduler/scheduler.py  scheduler/block_manager.py
scheduler/decode_batch.py  scheduler/admission.py
cache/block_pool.py  cache/radix_tree.py  cache/kv_cache.py
worker/model_runner.py  worker/batch_state.py  worker/staging.py
model/config.py  model/batch.py  model/forward.py  model/attention.py  model/decoder.py  model/mixer.py  model/linear.py
model/mlp.py  attention/torch_backend.py
worker/sampling.py  sampling/sampler.py  sampling/philox.py
text/stream.py  text/detokenizer.py  text/output.py
"""

SETUP = """
config.py  engine/build.py  engine/forwards.py  engine/options.py
model/checkpoint.py  model/hf_config.py  model/family.py  model/families.py  model/weight_names.py
model/decoder_weights.py  model/loader.py  model/streaming.py  model/rope.py  worker/memory_plan.py  attention/select.py
"""

CHAT = """
api/app.py  api/chat_completions.py  api/protocol.py  api/checks.py  conversation/template.py
api/generation.py  engine/client.py  engine/slots.py  engine/slot.py  engine/messages.py  engine/wire.py  engine/core.py
scheduler/request.py  scheduler/plan.py  scheduler/scheduler.py  scheduler/block_manager.py
worker/model_runner.py  worker/batch_state.py  model/decoder.py  attention/triton_backend.py  kernels/attention_decode.py
worker/sampling.py  engine/streams.py  text/stream.py  conversation/answer.py  api/sse.py
"""


def num_lines(name: str) -> int:
    return len((SRC / name).read_text().splitlines())


def main() -> None:
    for title, listed in (("core path", CORE), ("from a checkpoint to a running engine", SETUP), ("one chat request", CHAT)):
        names = listed.split()
        print(f"{title}: {sum(map(num_lines, names))} lines in {len(names)} files")
        for name in names:
            print(f"{num_lines(name):6}  {name}")
    lines = {str(path.relative_to(SRC)): num_lines(str(path)) for path in SRC.rglob("*.py")}
    longest = max(lines, key=lambda name: lines[name])
    print(f"src/headrace: {sum(lines.values())} lines in {len(lines)} files; the longest is {longest}, {lines[longest]}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` takes the first lines alone
    main()
