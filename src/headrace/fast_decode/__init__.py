"""The decode step of few rows on a card, one wing: `forward.py` runs it by the kernels beside it; seam: `Forward.decode`."""
