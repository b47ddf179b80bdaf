"""Output that follows a grammar: what may be asked for, how it is compiled, and the masks that enforce it."""
