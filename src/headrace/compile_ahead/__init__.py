"""Kernels are compiled before anybody waits for one, by many processes, with the card or without it; one wing.

`ahead.py` is what the engine sees of it. A process of its own (`process.py`) plays a model's steps on tensors without data
(`steps.py`), in front of a card that is not there (`no_device.py`), and notes which kernels they would launch; a pool of its
forks compiles them into Triton's cache (`pool.py`), under the keys that a machine with the card looks for.
"""
