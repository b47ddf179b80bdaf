"""File formats: where tensors, tokenizers and settings lie in a file, and how its blocks are decoded."""
