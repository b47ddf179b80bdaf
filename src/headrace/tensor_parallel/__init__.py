"""Tensor parallelism: the processes of a core's ranks, how they are kept in step, and what they say to each other."""
