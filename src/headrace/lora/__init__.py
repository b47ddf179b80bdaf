"""LoRA adapters: small additions to a model's products, many of them beside each other in one batch."""
