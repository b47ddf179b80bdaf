"""Which part of the weights of multi-head latent attention a rank has: its heads. Latents are whole on every rank."""

from __future__ import annotations

from headrace.model.config import ModelConfig
from headrace.model.latent_config import LatentConfig
from headrace.model.shard import Shard


def latent_rows(name: str, config: ModelConfig, latent: LatentConfig, shard: Shard) -> list[range] | None:
    """Rows of the weight `name` of the whole model, or columns of "o"; None: all of them."""
    own = shard.part(config.num_heads)

    def heads(size: int) -> range:
        return range(own.start * size, own.stop * size)

    match name:
        case "qkv" if not latent.query_rank:  # the row that is cached lies behind all queries
            queries = config.num_heads * latent.query
            return [heads(latent.query), range(queries, queries + latent.row)]
        case "q_b":
            return [heads(latent.query)]
        case "kv_b":
            return [heads(latent.nope + latent.value)]
        case "o":
            return [heads(latent.value)]
    return None
