"""Several tokens per step: proposers guess what a request says next, one forward pass of the model verifies all of it."""
