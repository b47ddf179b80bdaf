"""Compile the Triton kernels for a card that is not there: python tests/compile_kernels.py 90|80 [part of a case's name].

A stand-in for the driver names the target, meta tensors stand for the arguments, and every launch only compiles. Prints a JSON
line per kernel: case, kernel, registers, spilled bytes, shared memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.kernels import attention_decode, attention_prefill, launch, prepare
from headrace.kernels.activation import act_mul_triton
from headrace.kernels.attention_decode import SplitWorkspace, split_attention
from headrace.kernels.attention_prefill import VarlenTile, varlen_attention
from headrace.kernels.embedding import embed_triton
from headrace.kernels.gather_kv import gather_kv
from headrace.kernels.norm import add_rms_norm_triton, rms_norm_triton
from headrace.kernels.qkv import qkv_rope_write_triton

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
META = torch.device("meta")


class NoDevice(DriverBase):
    """The part of a driver that compilation asks for."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_active_torch_device(self) -> torch.device:
        return META

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self):
        return None


compiled: list = []
original_run = JITFunction.run


def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = original_run(self, *args, grid=grid, warmup=True, **kwargs)
    compiled.append((self.fn.__name__, kernel))
    return kernel


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory, which are spills) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        out = subprocess.run([CUOBJDUMP, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found is not None, out
    return int(found[1]), int(found[2])


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


def attention(heads: int, kv_heads: int, head_dim: int, *, block: int = 64, dtype=torch.bfloat16, window: int = 0,
              softcap: float = 0.0, tokens: int = 1, tile: VarlenTile | None = None,
              kind: str = "split") -> Callable[[], None]:  # fmt: skip
    def run() -> None:
        cache = meta(1000, block, kv_heads, head_dim, dtype=dtype)
        q = meta(512, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
        args = (q, cache, cache, meta(512, heads * head_dim, dtype=dtype), ints(257, 64), ints(32), ints(33), ints(32))
        options = {"scale": 0.1, "window": window, "softcap": softcap}
        if kind == "gather":
            out = meta(4096, kv_heads, head_dim, dtype=dtype)
            gather_kv(cache, cache, out, out, ints(257, 64), ints(32), ints(33), first_seq=2, num_seqs=3, max_context=4096)
        elif kind == "split":
            workspace = SplitWorkspace.allocate(256, heads, kv_heads, head_dim, META)
            split_attention(*args, workspace, first_seq=0, num_seqs=32, tokens=tokens, max_context=4096, **options)
        else:
            varlen_attention(*args, first_seq=2, num_seqs=3, num_rows=512, max_tokens=512, tile=tile, **options)

    return run


def fused(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, norm: bool, rot: int) -> Callable[[], None]:
    def run() -> None:
        x = embed_triton(ints(32), meta(1000, hidden))
        rms_norm_triton(x, meta(hidden), 1e-6)
        add_rms_norm_triton(x, x, meta(hidden), 1e-6)
        act_mul_triton(meta(32, 2 * inner), "silu")
        act_mul_triton(meta(32, 2 * inner), "gelu_tanh")
        cache = [meta(1000, 64, kv_heads, head_dim)]
        weight = meta(head_dim) if norm else None
        for keep in (False, True):
            kv = SimpleNamespace(k=cache, v=cache, keep_rows=keep, rows=None)
            qkv_rope_write_triton(
                meta(32, (heads + 2 * kv_heads) * head_dim), ints(32), meta(4096, rot // 2, dtype=torch.float32),
                meta(4096, rot // 2, dtype=torch.float32), kv, 0, ints(32, dtype=torch.int64), num_heads=heads,  # type: ignore[arg-type]
                num_kv_heads=kv_heads, head_dim=head_dim, q_norm=weight, k_norm=weight, eps=1e-6, norm_offset=0.0,
            )  # fmt: skip

    return run


def rows(count: int) -> Callable[[], None]:
    def run() -> None:
        out = prepare.DecodeRows.empty(count, META)
        table, f32 = ints(257, 4097), torch.float32
        inbox, turn = ints(64, 4, 512), ints(1)
        prepare.launch(inbox, turn, table, ints(257, 64), meta(257, 6, dtype=f32), ints(257, 4, dtype=torch.int64), ints(257), out, 64)
        prepare.launch_publish(ints(count), ints(count).bool(), out, table, ints(64, 2, 512), turn)

    return run


CASES: dict[str, Callable[[], None]] = {
    "split 0.6B": attention(16, 8, 128),
    "split 8B": attention(32, 8, 128),
    "split head 256 window softcap": attention(8, 4, 256, window=4096, softcap=50.0),
    "split head 80 block 16": attention(9, 3, 80, block=16),
    "split rows 64": attention(32, 8, 128, tokens=16),
    "varlen 0.6B": attention(16, 8, 128, kind="varlen"),
    "varlen 8B": attention(32, 8, 128, kind="varlen"),
    "varlen pointers": attention(32, 8, 128, kind="varlen", tile=VarlenTile(128, 64, 8, 3, False)),
    "varlen head 256 window softcap": attention(8, 4, 256, kind="varlen", window=4096, softcap=50.0),
    "varlen head 64 block 16": attention(9, 3, 64, block=16, kind="varlen"),
    "varlen float32": attention(9, 3, 64, kind="varlen", dtype=torch.float32),
    "gather 8B": attention(32, 8, 128, kind="gather"),
    "rows of a decode step": rows(32),
    "fused 8B": fused(4096, 32, 8, 128, 12288, True, 128),
    "fused 0.6B": fused(1024, 16, 8, 128, 3072, True, 128),
    "fused 135M": fused(576, 9, 3, 64, 1536, False, 64),
}


def main(part: str = "") -> None:
    driver.set_active(NoDevice())
    JITFunction.run = compile_only  # type: ignore[method-assign]
    for module in (launch, attention_decode, attention_prefill):
        module.capability = lambda device: divmod(CAPABILITY, 10)  # type: ignore[attr-defined]
    for name, case in CASES.items():
        if part not in name:
            continue
        compiled.clear()
        case()
        for kernel_name, kernel in compiled:
            registers, spills = usage(kernel.asm["cubin"])
            print(json.dumps({"case": name, "kernel": kernel_name, "registers": registers, "spills": spills,
                              "shared": kernel.metadata.shared}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[2:3])
