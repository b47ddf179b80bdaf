"""What multi-head latent attention is in a model: of one cached row a token all heads' keys and values are products."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ParameterError


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2). Of a token the cache keeps its latent, and one
    rotated key that all heads share. A head's key is a product of the latent with that behind it, its value another product.
    """

    rank: int  # columns of the latent
    rope: int  # of the shared key, and of a head's query that meets it
    nope: int  # of a head's other query and key, which are not rotated
    value: int  # of a head's value
    query_rank: int = 0  # queries are products of a latent of their own of so many columns; 0: of the hidden state
    interleaved: bool = True  # rotary pairs are neighbours in the file
    norm_eps: float = 1e-6  # of the norms of both latents, whatever the layers' is

    @property
    def row(self) -> int:
        """Columns that the cache keeps of a token: the latent, then the rotated key."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Columns of a head's query as it is projected: what is not rotated, then what is."""
        return self.nope + self.rope

    def row_elements(self, heads: int) -> int:
        """Numbers of a row beside queries that meet latents, and what attention gives: queries as they were projected; where
        keys and values of heads are made, these, queries beside them and their results."""
        return heads * (3 * self.query + self.nope + 3 * self.value)


def refuse_narrow_cache(latent: LatentConfig | None, kv_cache_dtype: str) -> None:
    """Raises ParameterError where latents were to be kept in FP8."""
    if latent is not None and kv_cache_dtype == "fp8":
        raise ParameterError("kv_cache_dtype", "fp8", "auto for this model: a cache of latents has the model's dtype")
