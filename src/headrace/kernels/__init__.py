"""Kernels: one file each, a Triton kernel and its torch reference behind one function that chooses by device."""
