"""Tile tables of the small-batch path that were searched on a card: read where they are known, else the defaults serve.

A table is found by `benchmarks/gpu_decode.py --tune`, which starts from the one there is and keeps its `short_attention` (that
was chosen by hand, from steps of up to 256 tokens). It is looked for in the user's cache directory, then among those that come
with the package; it belongs to a card and to the shapes of a model's matrices. The largest number of rows in it is where
the path ends: above, cuBLAS was faster.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from headrace.config import cache_dir
from headrace.model.config import ModelConfig
from headrace.model.decode_tiles import TileTable, from_json

logger = logging.getLogger(__name__)
SHIPPED = Path(__file__).parent / "tiles"


def tile_file_name(card: str, config: ModelConfig) -> str:
    shape = (config.hidden_size, config.intermediate_size, config.q_size, config.kv_size, config.head_dim, config.vocab_size)
    return "-".join([card.lower().replace(" ", "-"), *map(str, shape)]) + ".json"


def load_tiles(config: ModelConfig, device: torch.device) -> TileTable | None:
    """The table of this card and model; None if there is none. A file that cannot be read is reported and passed over."""
    name = tile_file_name(torch.cuda.get_device_name(device), config)
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
