"""What adapters are called by users, and what requests carry instead: the digest of what a name meant when they came."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.lora.format import examine
from headrace.lora.targets import modules_of
from headrace.lora.version import Version
from headrace.model.config import ModelConfig
from headrace.sampling.params import SamplingParams

SALT = "\0lora\0"  # before the digest in the salt of a prefix cache's root


def salted(salt: str, digest: str) -> str:
    """The root of the prefix cache for a request: other contents of adapters never share one, whatever they are called.

    Raises ParameterError for a salt of the request's own that could be taken for another's.
    """
    if salt.startswith(SALT):
        raise ParameterError("cache_salt", salt, "a text that does not begin with \\0lora\\0")
    return f"{SALT}{digest}\0{salt}" if digest else salt


def named_adapters(config: EngineConfig, model: ModelConfig) -> dict[str, Version]:
    """Those of the options. Raises CheckpointError for one that cannot run with this model, ParameterError for a `lora_dir`
    that is none."""
    if config.lora_dir is not None and not os.path.isdir(os.path.expanduser(config.lora_dir)):
        raise ParameterError("lora_dir", config.lora_dir, "a directory that is there")
    modules = modules_of(model, config.lora_experts) if config.lora else {}
    return {name: examine(path, modules, config.max_lora_rank) for name, path in config.adapter_paths().items()}


def meant(name: str, versions: Mapping[str, Version]) -> str:
    """The digest of an adapter's name; nothing of nothing. Raises ParameterError for one that is not there."""
    if not name:
        return ""
    if name not in versions:
        known = f"one of {', '.join(sorted(versions))}" if versions else "none: no adapter is loaded"
        raise ParameterError("lora", name, known)
    return versions[name].digest


def with_adapters(
    params: Sequence[SamplingParams], names: str | Sequence[str | None] | None, versions: Mapping[str, Version]
) -> list[SamplingParams]:
    """The parameters of each prompt with the digest of its adapter: of the one named for all, or for it. Raises ParameterError
    for what is no parameters, too."""
    for p in params:
        if not isinstance(p, SamplingParams):
            raise ParameterError("sampling_params", p, "SamplingParams, for all prompts or for each")
    each = [names] * len(params) if names is None or isinstance(names, str) else list(names)
    if len(each) != len(params):
        raise ParameterError("lora", f"{len(each)} entries", f"one for each of the {len(params)} prompts")
    made: dict[tuple[int, str], SamplingParams] = {}
    for p, name in zip(params, each, strict=True):
        wanted = p.lora if name is None else name
        if (id(p), wanted) not in made:
            made[id(p), wanted] = msgspec.structs.replace(p, lora=meant(wanted, versions)) if wanted else p
    return [made[id(p), p.lora if name is None else name] for p, name in zip(params, each, strict=True)]
