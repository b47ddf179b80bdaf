"""A model's weights without their numbers: of each kind of layer one, the most frequent first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from headrace.model.checkpoint import MADE, Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import MATRICES, DecoderWeights
from headrace.model.formats.gpt_oss_experts import GROUP, is_random_mxfp4
from headrace.model.loader import plan_of, with_quantized
from headrace.model.narrow_loader import Source, load_matrices, narrow_sources
from headrace.model.weight import TOGETHER, Kind, Weight
from headrace.model.weight_names import WeightSpec, made_kind

META = torch.device("meta")
_DATA = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def weights_without_data(
    checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype, quantization: str | None
) -> tuple[ModelConfig, DecoderWeights]:  # fmt: skip
    """What `load_model` would make on a card; and the model of these layers alone.

    Of a file's narrow matrices the first of each form is read: which kind it becomes, and in which floats its scales are,
    is seen by its numbers.
    """
    plan, narrow = plan_of(checkpoint, model), {}
    tied = checkpoint.ties_head(model.family)
    if quantization in MADE and (checkpoint.format == "dummy" or not checkpoint.quantized_to()):
        if tied and checkpoint.format != "dummy":  # and written out once more?
            tied = not {name for spec in plan if spec.optional for name, _ in spec.sources} <= checkpoint.tensors().keys()
        here = [spec for spec in plan if not (spec.optional and tied)]
        narrow = {spec.target: _made(spec, kind) for spec in here if (kind := made_kind(spec, quantization)) is not None}
    elif quantization != "none" and checkpoint.format == "dummy":
        narrow = {spec.target: _mxfp4(spec) for spec in plan if is_random_mxfp4(checkpoint.config, spec)}
    elif quantization != "none" and checkpoint.quantized_to():
        narrow = _as_in_file(checkpoint, plan, dtype, 1 if model.experts is None else model.experts.count)
    tensors: dict[str, Tensor | Weight] = {
        spec.target: narrow.get(spec.target)
        or torch.empty(spec.shape, dtype=torch.float32 if spec.exact else dtype, device=META)
        for spec in plan
        if not (spec.optional and tied and spec.target not in narrow)
    }
    weights = DecoderWeights.from_tensors(tensors, model)
    if model.per_layer is not None:  # no two need be alike
        return model, weights
    forms = [(model.window(i), *layer.more, *map(_form_of, _matrices(layer))) for i, layer in enumerate(weights.layers)]
    kept = [forms.index(form) for form, _ in Counter(forms).most_common()]
    windows = tuple(model.window(i) for i in kept) if model.windows else ()
    experts = model.experts and replace(model.experts, layers=tuple(model.experts.at(i) for i in kept))
    delta = model.delta and replace(model.delta, layers=tuple(model.delta.layers[i] for i in kept))
    model = replace(model, num_layers=len(kept), windows=windows, experts=experts, delta=delta)
    return model, replace(weights, layers=[weights.layers[i] for i in kept])


def _form_of(w: Weight) -> tuple:
    return (w.kind, w.group, w.scale_rows, *(t.dtype for t in w.tensors))


def _name(spec: WeightSpec) -> str:
    return spec.target.rpartition(".")[2]


def _matrices(layer) -> list[Weight]:
    return [getattr(layer, name) for name in MATRICES] + [w for w in layer.more.values() if isinstance(w, Weight)]


def _made(spec: WeightSpec, kind: str) -> Weight:
    """What `narrow.quantized` makes of a matrix of floats: of random numbers, scales that only float32 holds exactly."""
    rows, columns = spec.shape
    if kind == "int4" and columns % TOGETHER == 0:
        scales = torch.empty(rows, columns // TOGETHER, dtype=torch.float16, device=META)
        data = torch.empty(rows, columns // 2, dtype=_DATA[kind], device=META)
        return Weight(data, scales, torch.empty_like(scales, dtype=torch.uint8), "int4", TOGETHER)
    groups = -(-columns // TOGETHER) if kind == "int4" else 1
    scales = torch.empty(rows, groups, dtype=torch.float16 if kind == "int4" else torch.float32, device=META)
    zeros, held = (scales, "int8") if kind == "int4" else (None, kind)
    data = torch.empty(rows, columns, dtype=_DATA[held], device=META)
    return Weight(data, scales, zeros, cast(Kind, held), TOGETHER if kind == "int4" else 0)


def _mxfp4(spec: WeightSpec) -> Weight:
    """What `random_mxfp4` makes."""
    rows, columns = spec.shape[0], -(-spec.shape[1] // TOGETHER) * TOGETHER
    scales = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16, device=META)
    return Weight(torch.empty(rows, columns // 2, dtype=torch.uint8, device=META), scales, None, "fp4", GROUP)


def _as_in_file(checkpoint: Checkpoint, plan: list[WeightSpec], dtype: torch.dtype, experts: int) -> dict[str, Weight]:
    found = with_quantized(checkpoint, plan)
    plan = [spec for spec in plan if not spec.optional or all(name in found for name, _ in spec.sources)]  # a head may be tied
    entries = narrow_sources(plan, found, None, keep=True)
    forms: dict[tuple, list[WeightSpec]] = {}
    for spec in plan:
        sources = [entries[name] for name, _ in spec.sources if name in entries]
        if len(spec.shape) == 2 and spec.target != "embedding" and any(hasattr(source, "parts") for source in sources):
            forms.setdefault((_name(spec), spec.shape, *map(_form, sources)), []).append(spec)
    first = [_of_one(specs[0], experts) for specs in forms.values()]
    read = load_matrices(first, entries, dtype, torch.device("cpu"), keep=True)
    made = {name: _without_data(read[specs[0].target], specs[0].shape[0]) for name, specs in forms.items()}
    return {spec.target: made[name] for name, specs in forms.items() for spec in specs}


def _of_one(spec: WeightSpec, experts: int) -> WeightSpec:
    """Of a layer's experts the first alone: all of them may be gigabytes."""
    if not _name(spec).startswith("experts_"):
        return spec
    sources = spec.sources[: len(spec.sources) // experts]
    return replace(spec, shape=(spec.shape[0] // experts, spec.shape[1]), sources=sources)


def _form(source: Source) -> tuple:
    """What is known of a source by its file's header, and by config.json."""
    parts = getattr(source, "parts", None)
    if parts is None:
        return (source.encoding.name,)  # type: ignore[union-attr]
    held = tuple((role, part.entry.encoding.name, part.entry.shape) for role, part in parts.items())
    return (getattr(source, "scheme", None), *held)


def _without_data(weight: Weight, rows: int) -> Weight:
    """The same for so many rows, a multiple of its own."""
    more = rows // weight.shape[0]
    data, scales, zeros = (
        None if t is None else torch.empty(len(t) * more, *t.shape[1:], dtype=t.dtype, device=META)
        for t in (weight.data, weight.scales, weight.zeros)
    )
    assert data is not None
    return replace(weight, data=data, scales=scales, zeros=zeros)
