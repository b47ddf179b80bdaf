"""Engines with faults built in, for the tests of the server: `builder` names of EngineClient."""

from __future__ import annotations

import torch

from headrace.config import EngineConfig
from headrace.engine.build import Engine, build_engine

POISON = 77  # the core dies of computing this token
POISON_NAN = 78  # its logits are NaN
POISON_HANG = 79  # the step never ends


class SensitiveDecoder:
    """A decoder that some token ids do not agree with."""

    def __init__(self, decoder):
        self.decoder = decoder

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def forward(self, batch, kv, wanted=None):
        ids = batch.token_ids.tolist()
        if POISON in ids:
            raise RuntimeError("this token ends the engine")
        while POISON_HANG in ids:
            pass
        hidden = self.decoder.forward(batch, kv, wanted)
        sick = torch.tensor([i == POISON_NAN for i in ids])
        sick = sick if wanted is None else sick[wanted.index]
        return torch.where(sick[:, None], torch.nan, hidden) if sick.any() else hidden

    def decode(self, batch, kv):
        return self.decoder.logits(self.forward(batch, kv))


def sensitive(config: EngineConfig) -> Engine:
    engine = build_engine(config)
    engine.core.runner.decoder = SensitiveDecoder(engine.core.runner.decoder)
    return engine
