"""Attention over the paged KV cache: backends of one interface, model.attention.AttentionBackend."""
