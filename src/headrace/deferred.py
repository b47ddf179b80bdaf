"""`import torch` without what only its compilers use: such a module is run when somebody looks for something in it.

Export, kernels in Python for tensors without data and the decompositions behind them take a quarter of that import, and an
engine has no use for them. For processes that are ours: in anybody else's torch stays as it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LATER = frozenset({"torch._meta_registrations", "torch.export"})


def defer_imports() -> None:
    """From now on in this process; what has been imported stays."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in LATER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    def __init__(self, loader: Loader):
        self.loader: Loader | None = loader
        self.lock = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Waiting(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def run(self, module: ModuleType) -> None:
        with self.lock:  # whoever comes second waits for the first; the module itself may look into itself
            loader, self.loader = self.loader, None
            if loader is not None:
                loader.exec_module(module)
                module.__class__ = ModuleType


class _Waiting(ModuleType):
    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):  # those the import itself looks for
            assert self.__spec__ is not None and isinstance(self.__spec__.loader, _Later)
            self.__spec__.loader.run(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
