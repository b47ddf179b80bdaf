"""Engines with faults or a brake built in, for the tests of the server: `builder` names of EngineClient."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from headrace.config import EngineConfig
from headrace.engine.build import Engine, build_engine
from headrace.engine.messages import Outputs

POISON = 77  # the core dies of computing this token
POISON_NAN = 78  # its logits are NaN
POISON_HANG = 79  # the step never ends
BRAKED_SECONDS = 0.05


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


def while_there(name: str) -> None:
    while (Path(tempfile.gettempdir()) / name).exists():
        time.sleep(0.01)


def braked(config: EngineConfig) -> Engine:
    """While there is a file named brake in TMPDIR its steps take 50 ms: an answer lasts until the test has done what it
    does in its midst, however fast the machine is (see ServerProcess.braked). While there is one named load it is not built."""
    while_there("load")
    engine = build_engine(config)
    step, brake = engine.core.step, Path(tempfile.gettempdir()) / "brake"

    def slow() -> Outputs:
        end = time.monotonic() + BRAKED_SECONDS
        while brake.exists() and time.monotonic() < end:
            time.sleep(0.001)
        return step()

    engine.core.step = slow  # type: ignore[method-assign]
    return engine


class PlayedPool:
    """Of two kernels: of each it tells when a file is gone."""

    def wait(self, told: Callable[[int, int], None]) -> None:
        while_there("play")
        for done in range(3):
            told(done, 2)
            while_there(f"compile-{done}")

    def __exit__(self, *_: object) -> None:
        pass


def prepared(config: EngineConfig) -> Engine:
    """It is made ready as on a card, with compilers and captures that last as long as there are files for them in TMPDIR."""
    engine = braked(config)
    assert engine.preparation is not None
    engine.preparation._wanted, engine.preparation._compilation = True, PlayedPool()  # type: ignore[assignment]
    runner = engine.core.runner

    def capture() -> None:
        while_there("capture")
        runner.graphs = None  # there are none here

    runner.graphs = SimpleNamespace(prepare=capture)  # type: ignore[assignment]
    return engine


def sensitive(config: EngineConfig) -> Engine:
    engine = braked(config)
    engine.core.runner.decoder = SensitiveDecoder(engine.core.runner.decoder)
    return engine
