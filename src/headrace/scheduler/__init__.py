"""Who runs how many tokens next, who holds slots and blocks: plain Python over ints, and no torch."""
