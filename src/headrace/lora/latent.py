"""Adapters of the product that latent attention is in the place of: kv_b, by which heads' keys and values are made of latents.

A head's key is (W + s B A) c of the latent c, so a query q meets it by q W c + s (q B) A c; its value likewise. So what an
adapter adds goes through its rank, by head, before attention and behind it, and the cache keeps latents as they are. All slots
are gone through, and a row takes part in its own: nobody knows on the host whose rows are there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.kernels.lora import Pair


class HeadAdds:
    """Of one layer. `numbers` gives the step's rows (0, or one more than the row's slot), None: nobody has an adapter."""

    def __init__(self, pair: Pair, heads: int, nope: int, numbers: Callable[[], Tensor | None]):
        self.pair, self.nope, self.numbers, self.heads = pair, nope, numbers, heads

    def keys(self, q: Tensor, straight: Tensor, rows: slice) -> None:
        """q [heads, n, latent] += what queries that are not rotated, `straight` [heads, n, nope], meet of adapters."""
        if (own := self._own(rows)) is not None:
            shrunk = (straight @ self._by_head()[:, :, : self.nope]) * own
            q += (shrunk @ self.pair.a[:, None]).sum(0)

    def values(self, out: Tensor, found: Tensor, rows: slice) -> None:
        """out [heads, n, value] += what adapters make of attention's sums of latents, `found` [heads, n, latent]."""
        if (own := self._own(rows)) is not None:
            shrunk = (found @ self.pair.a.transpose(1, 2)[:, None]) * own
            out += (shrunk @ self._by_head()[:, :, self.nope :].transpose(2, 3)).sum(0)

    def expanded(self, made: Tensor, latents: Tensor, rows: slice) -> None:
        """made [n, heads * (nope + value)] += of latents [n, latent]."""
        if (own := self._own(rows)) is not None:
            shrunk = (latents @ self.pair.a.transpose(1, 2)) * own[:, 0]
            made += (shrunk @ self.pair.b.transpose(1, 2)).sum(0)

    def _by_head(self) -> Tensor:
        """B [slots, heads, nope + value, rank]"""
        return self.pair.b.unflatten(1, (self.heads, -1))

    def _own(self, rows: slice) -> Tensor | None:
        """[slots, 1, n, 1]: a slot's scale for rows that have it, else 0."""
        numbers = self.numbers()
        if numbers is None:
            return None
        slots = self.pair.scales.new_tensor(range(1, len(self.pair.scales) + 1))
        own = (numbers[rows] == slots[:, None]) * self.pair.scales[:, :1]
        return own[:, None, :, None].to(self.pair.a.dtype)
