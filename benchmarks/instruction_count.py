"""What a product's inner loop issues for a byte of weights, read from the machine code that Triton makes for sm_90: no card.

    python benchmarks/instruction_count.py [--products gate_up,down] [--rows 8,32] [--kinds fp8,int4] [--tile TILE] [--list]

Of each kernel the largest loop (with tensor cores, if one has), all between a branch back and its target, and its instructions
by sort: how many a byte of weights takes is what docs/quantization.md counts. A loop that is unrolled whole is none.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

import torch

import compile_ahead
import gpu_decode
from headrace.fast_decode import products
from headrace.fast_decode import tiles as decode_tiles
from headrace.fast_decode.products import GemvTile, RoundedTile, Tile, WarpTile  # noqa: F401  (what --tile may name)
from headrace.fast_decode.ring_tile import row_block
from headrace.fast_decode.rounded_tile import PAIR_ROWS
from headrace.fast_decode.skinny_gemm import GemmTile  # noqa: F401
from headrace.fast_decode.tile_tables import load_tiles
from headrace.kernels.split import SplitSpace

SORTS = {
    "tensor cores": "[HQI]G?MMA|WARPGROUP|R2UR", "from memory": "LDG|LDGSTS|LDGDEPBAR|DEPBAR|UBLKCP",
    "shared memory": "LDS|STS|LDSM|STSM|BAR|SYNCS|FENCE",
    "bits and conversions": "F2FP?|I2F|PRMT|LOP3|SHF|H(FMA|ADD|MUL|MNMX)2",
    "float32": "FFMA|FADD|FMUL", "between threads": "SHFL|REDUX",
}  # fmt: skip
META = torch.device("meta")


def disassembled(cubin: bytes) -> list[tuple[int, str]]:
    """(address, instruction) of a kernel."""
    text = compile_ahead.told("nvdisasm", cubin, "-c", "-hex")
    assert text is not None, "Triton brings no disassembler here"
    labels: dict[str, int] = {}
    found: list[tuple[int, str]] = []
    waiting: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif code := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+([^;]+);", line):
            labels |= dict.fromkeys(waiting, int(code[1], 16))
            waiting = []
            found.append((int(code[1], 16), " ".join(code[2].split())))
    return [(at, re.sub(r"`\((\.L_x_\d+)\)", lambda m: hex(labels.get(m[1], 0)), line)) for at, line in found]


def largest_loop(code: list[tuple[int, str]]) -> list[str]:
    best: list[str] = []
    for at, line in code:
        if (branch := re.search(r"BRA\S* .*?(0x[0-9a-f]+)", line)) and int(branch[1], 16) < at:
            inside = [text for place, text in code if int(branch[1], 16) <= place <= at]
            best = max(best, inside, key=lambda loop: (any("MMA" in line for line in loop), len(loop)))
    return best


def operation(line: str) -> str:
    return re.sub(r"^@!?U?P\w+ ", "", line).split(" ")[0]


def launch(name: str, kind: str, rows: int, tile: Tile) -> None:
    """Compile the 8B's product of that name."""
    config = gpu_decode.MODELS["8b"]
    shape = decode_tiles.product_shapes(config)[name]
    height = shape.columns * (2 if shape.gated else 1)
    weight = gpu_decode.narrow_meta(height, shape.width, kind) if kind != "float" else gpu_decode.Weight(
        torch.empty(height, shape.width, dtype=gpu_decode.BF16, device=META)
    )  # fmt: skip
    def activation(columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in whole steps."""
        if not isinstance(tile, RoundedTile):
            return torch.empty(rows, columns, dtype=gpu_decode.BF16, device=META), None
        codes = torch.empty(*((2,) if rows <= PAIR_ROWS else ()), rows, columns, dtype=torch.float8_e4m3fn, device=META)
        return codes, torch.empty(columns // 128, row_block(rows), device=META)

    def floats(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=torch.float32, device=META)

    (x, sizes), (out, out_sizes), sumsq = activation(shape.width), activation(shape.columns), floats(rows, 64)
    norm = torch.empty(shape.columns, dtype=gpu_decode.BF16, device=META)
    splits = products.num_splits(tile)
    space = None
    if splits > 1:
        space = SplitSpace(tile.partial_elements(rows, shape.columns), -(-shape.columns // tile.block_n), META)
    if shape.gated:
        products.glu(x, weight, out, tile, sumsq=sumsq, eps=1e-6, sizes=sizes, out_sizes=out_sizes)
    elif name in ("o", "down"):
        tiles = -(-shape.columns // tile.block_n)
        total, sums = floats(rows, shape.columns), floats(rows, tiles)
        products.residual(x, weight, total, out, sums, norm, tile, space, sizes=sizes, out_sizes=out_sizes)
    else:
        products.project(x, weight, floats(splits, rows, shape.columns), tile, sumsq=sumsq, eps=1e-6, sizes=sizes)


def usual_tile(name: str, kind: str, rows: int) -> Tile:
    """Of the table for an H200."""
    config = gpu_decode.MODELS["8b"]
    kinds = (kind,) * 4 + ("float",)
    table = load_tiles(config, "NVIDIA H200", kinds) or decode_tiles.default_table(config, True, kinds)
    return getattr(table[min(n for n in table if n >= rows)], name)


def report(name: str, kind: str, rows: int, tile: Tile, found: list, listed: bool) -> None:
    found.clear()
    launch(name, kind, rows, tile)
    kernel = found[-1][1]
    loop = largest_loop(disassembled(kernel.asm["cubin"]))
    registers, spills = compile_ahead.usage(kernel.asm["cubin"])
    counts = Counter(operation(line).split(".")[0] for line in loop)
    sorts = {sort: sum(n for op, n in counts.items() if re.fullmatch(names, op)) for sort, names in SORTS.items()}
    sorts["the rest"] = len(loop) - sum(sorts.values())
    print(f"{name} {kind} {rows} rows {tile}: {len(loop)} instructions")
    print("  ", ", ".join(f"{sort} {n}" for sort, n in sorts.items() if n))
    print(f"   {registers} registers, {spills} bytes spilled, {kernel.metadata.shared} of shared memory", flush=True)
    if listed:
        print("\n".join(f"      {line}" for line in loop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", default="qkv,o,gate_up,down")
    parser.add_argument("--kinds", default="float,fp8,int4")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tile", help="in the place of the table's: GemmTile(64, 128, 1, 4, 3)")
    parser.add_argument("--list", action="store_true", help="the loop itself as well")
    options = parser.parse_args()
    found: list = []
    compile_ahead.install(90, lambda *pair: found.append(pair))
    for kind in options.kinds.split(","):
        for rows in map(int, options.rows.split(",")):
            for name in options.products.split(","):
                tile = eval(options.tile) if options.tile else usual_tile(name, kind, rows)
                report(name, kind, rows, tile, found, options.list)


if __name__ == "__main__":
    main()
