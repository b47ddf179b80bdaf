"""Tables of tiles that were searched on a card, as files: those that come with the package, and the user's own.

`benchmarks/gpu_decode.py --tune` finds one, starting from the one there is, and keeps its `short_attention` (that was chosen by
hand, from steps of up to 256 tokens).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from headrace.config import cache_dir
from headrace.fast_decode.attention import AttentionTile
from headrace.fast_decode.digit_tile import DigitTile
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import MAX_ROWS
from headrace.fast_decode.ring_tile import RingAttention, RingTile
from headrace.fast_decode.rounded_tile import RoundedTile
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.tiles import FLOAT, PRODUCTS, Kinds, StepTiles, TileTable
from headrace.fast_decode.warp_gemm import WarpTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.fast_decode.widened_tile import WidenedTile
from headrace.kernels.attention_decode import SplitTile
from headrace.model.config import ModelConfig

logger = logging.getLogger(__name__)
SHIPPED = Path(__file__).parent / "tables"  # that come with the package
# as a table's file names them
KINDS = {
    "gemv": GemvTile, "gemm": GemmTile, "ring": RingTile, "wide": WideTile, "warp": WarpTile, "digit": DigitTile,
    "rounded": RoundedTile, "widened": WidenedTile,
}  # fmt: skip


def from_json(text: str) -> dict[int, StepTiles]:
    """What benchmarks/tile_search.py writes. Raises ValueError, KeyError or TypeError on anything else."""
    table = {}
    for rows, entry in json.loads(text).items():
        products = {}
        for name in PRODUCTS:
            values = dict(entry[name])
            tile = products[name] = KINDS[values.pop("kind")](**values)
            if int(rows) > MAX_ROWS[type(tile)]:
                raise ValueError(f"{name}: {tile} takes at most {MAX_ROWS[type(tile)]} rows, not {rows}")
        kind = SplitTile if entry.get("attention_kernels", 1) == 2 else AttentionTile
        attention = kind(**entry["attention"])
        short, few, ring = (entry.get(f"{name}_attention") for name in ("short", "few", "ring"))
        table[int(rows)] = StepTiles(
            **products, attention=attention, attention_programs=entry["attention_programs"],
            short_attention=None if short is None else AttentionTile(**short),
            few_attention=None if few is None else AttentionTile(**few),
            ring_attention=None if ring is None else RingAttention(**ring),
            cluster_attention=tuple(RingAttention(**cluster) for cluster in entry.get("cluster_attention", ())),
        )  # fmt: skip
    if not table:
        raise ValueError("a table without rows")
    return table


def tile_file_name(card: str, config: ModelConfig, kinds: Kinds = FLOAT) -> str:
    shape = (config.hidden_size, config.intermediate_size, config.q_size, config.kv_size, config.head_dim, config.vocab_size)
    layers = kinds[:1] if len(set(kinds[:-1])) == 1 else kinds[:-1]
    narrow = [] if kinds == FLOAT else [*layers, *(kinds[-1:] if kinds[-1] != "float" or len(layers) > 1 else ())]
    return "-".join([card.lower().replace(" ", "-"), *map(str, shape), *narrow]) + ".json"


def load_tiles(config: ModelConfig, card: str, kinds: Kinds = FLOAT) -> TileTable | None:
    """The table of the card that is called so and the shapes and kinds of this model's matrices, from the user's cache
    directory or else the package; None if there is none. A file that cannot be read is reported and passed over."""
    name = tile_file_name(card, config, kinds)
    for path in (cache_dir() / "tiles" / name, SHIPPED / name):
        try:
            table = from_json(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as e:
            logger.warning("%s is no tile table (%s)", path, e)
            continue
        logger.info("tiles of small batches up to %d rows: %s", max(table), path)
        return table
    return None
