"""A server's adapters: what their names mean now, loaded into every core, and kept there until the last request has ended.

    load     examine -> every core that serves loads it -> the name means it from now on
    unload   nobody gets the name any more -> its requests end -> every core lets go of it

A core that starts is told of all that there are before it gets a request. Requests carry digests: one that goes on in another
core, or outlives its name, has the content that it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.lora.format import CONFIG, TENSORS, examine
from headrace.lora.names import named_adapters
from headrace.lora.targets import modules_of
from headrace.lora.version import Version
from headrace.model.config import ModelConfig

LOOK_SECONDS = 0.02
MAX_NAME = 200  # characters


class Cores(Protocol):
    """All cores of an engine."""

    def load_adapter(self, version: Version) -> None: ...

    def unload_adapter(self, digest: str) -> None: ...

    def adapter_states(self) -> Iterable[dict[str, str]]:
        """Of each core that serves: CoreAdapters.state, as it last said."""
        ...


class ServedAdapters:
    """`in_use` says whether a request has an adapter, by its digest. All methods belong to one event loop."""

    def __init__(self, config: EngineConfig, model: ModelConfig, cores: Cores, in_use: Callable[[str], bool]):
        self._config, self._model, self._cores, self._in_use = config, model, cores, in_use
        self.names: dict[str, Version] = {}
        if config.takes_adapters:
            self.names = named_adapters(config, model)
        self.held = {version.digest: version for version in self.names.values()}  # by cores, some under no name any more
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()

    def keep(self, names: Mapping[str, Version]) -> None:
        """What another one's names meant, before cores are told of any."""
        self.names = dict(names)
        self.held = {version.digest: version for version in names.values()}

    async def load(self, name: str, path: str, replace: bool = True) -> None:
        """From a directory inside of `lora_dir`. Raises ParameterError or CheckpointError; then nothing has changed."""
        config = self._config
        if config.lora_dir is None:
            raise ParameterError("lora_path", path, "nothing: the server was started without lora_dir")
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ParameterError("lora_name", name, f"1 to {MAX_NAME} printable characters")
        where = inside(config.lora_dir, path)
        modules = modules_of(self._model, config.lora_experts)
        version = await asyncio.to_thread(examine, where, modules, config.max_lora_rank)
        async with self._loading:  # two who ask at once for one name: the second finds it taken
            if name in self.names and not replace:
                raise ParameterError("lora_name", name, "a name that no adapter has, without load_inplace")
            if version.digest not in self.held:
                await self._hold(name, version)
            elif version.digest in self._leaving:
                self._leaving.pop(version.digest).cancel()
            old, self.names[name] = self.names.get(name), version
            if old is not None:
                self._leave(old)

    async def _hold(self, name: str, version: Version) -> None:
        """Have all cores load it."""
        most = self._config.max_loras
        while any(version.digest in state for state in self._cores.adapter_states()):
            await asyncio.sleep(LOOK_SECONDS)  # they have let go of it, or will, and not said so yet
        if len(self.held) >= most:
            raise ParameterError("lora_name", name, f"at most {most} adapters at the same time (max_loras), one must go first")
        self.held[version.digest] = version
        try:
            self._cores.load_adapter(version)
            while any(version.digest not in state for state in self._cores.adapter_states()):
                await asyncio.sleep(LOOK_SECONDS)
            if why := next(filter(None, (state.get(version.digest) for state in self._cores.adapter_states())), None):
                raise ParameterError("lora_path", version.path, why)
        except BaseException:
            del self.held[version.digest]
            self._cores.unload_adapter(version.digest)
            raise

    async def unload(self, name: str) -> None:
        """When this returns its requests have ended and its place is free. Whoever waits for it no longer changes nothing.

        Raises ParameterError for a name that no adapter has.
        """
        if name not in self.names:
            raise ParameterError("lora_name", name, f"one of {', '.join(self.names)}" if self.names else "none: there is none")
        task = self._leave(self.names.pop(name))
        if task is not None:
            await asyncio.wait({task})

    def _leave(self, version: Version) -> asyncio.Task[None] | None:
        """Let go of it when nobody has it any more, unless another name means the same."""
        digest = version.digest
        if any(other.digest == digest for other in self.names.values()):
            return None
        task = self._leaving[digest] = asyncio.create_task(self._when_unused(digest))
        return task

    async def _when_unused(self, digest: str) -> None:
        while self._in_use(digest):
            await asyncio.sleep(LOOK_SECONDS)
        del self._leaving[digest], self.held[digest]
        self._cores.unload_adapter(digest)


def inside(root: str, path: str) -> Path:
    """A directory below `root`, wherever links lead. Raises ParameterError for any other, whether it is there or not."""
    try:
        base = Path(root).expanduser().resolve()
        found = (base / path).resolve()
        files = [found, (found / CONFIG).resolve(), (found / TENSORS).resolve()]
    except (OSError, RuntimeError, ValueError):
        files, base = [], Path(root)
    if not files or found == base or not all(file.is_relative_to(base) for file in files):
        raise ParameterError("lora_path", path, f"a directory inside of {root} (lora_dir)")
    return found
