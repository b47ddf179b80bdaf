"""The adapters that a device holds, each in a slot, and which of them the rows of the step at hand have.

    load     an adapter's files -> its slot of every product's A and B: zeros where it has nothing
    make     how a decoder's products are made, so that they add what adapters do (linear.py)
    begin    called by the decoder before its layers: the rows of a batch, and of those that are left behind the last attention

Of several ranks each holds its part: where a product's outputs are split A is whole and B split, where its inputs are split
A is split and B whole, and the partial additions are summed up with the partial products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.launch import on_gpu
from headrace.kernels.lora import Groups, Pair, add_lora, add_lora_reference, group_rows, new_pair
from headrace.kernels.lora_product import MAX_ROWS, LowRank, Members, members_of, new_flags, num_tickets, shrink_few
from headrace.kernels.tables import Int
from headrace.lora.experts import ExpertsProduct, LayerExperts, Placed, step_bytes
from headrace.lora.format import TENSORS, Matrices, check, parsed, read_files
from headrace.lora.latent import HeadAdds
from headrace.lora.linear import LoraLinear
from headrace.lora.targets import expert_specs, modules_of, plain, specs_of
from headrace.lora.version import Version
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.delta_net import join_gates
from headrace.model.linear import Linear, MakeLinear, Reduce
from headrace.model.parts import parts_of
from headrace.model.rope_layout import order_of
from headrace.model.shard import Shard
from headrace.model.weight import Weight

GATES = "delta_gates"
BEFORE_LAST = ("qkv", "q_b", GATES)  # products that the last layer has of all rows


class Part(NamedTuple):
    """Some outputs of a module, here: a run of a product's."""

    name: str  # the tensor in the base model's checkpoint
    rows: range
    columns: range  # of its inputs


@dataclass(slots=True)
class Product:
    """One of the decoder's products."""

    layer: int
    parts: list[Part]
    pair: Pair
    behind: bool  # the last attention: it has the wanted rows only
    made: bool = False  # the decoder has it


class AdapterRead(NamedTuple):
    """An adapter's tensors on the host, which module has which of them, and those of experts as they are to lie."""

    tensors: dict[str, Tensor]
    matrices: dict[str, Matrices]
    experts: list[Placed | None]


class AdapterPool:
    """Indexed by an adapter's digest: what it is called in the slots' table (Int.LORA), one more than its slot; 0 of none."""

    def __init__(
        self, model: ModelConfig, shard: Shard, slots: int, max_rank: int, max_rows: int, dtype: torch.dtype,
        device: torch.device, experts: bool = False,
    ):  # fmt: skip
        """Of the whole `model` the part of a rank. `max_rows` of a step. `experts`: so are those that tokens choose."""
        self.model, self.slots, self.max_rank, self.max_rows, self.device = model, slots, max_rank, max_rows, device
        self.modules = modules_of(model, experts)
        self._numbers = {"": 0}
        self.table: Tensor | None = None  # SlotTables.ints
        self._products: dict[str, Product] = {}
        self._tickets = torch.zeros(0, dtype=torch.int32, device=device)
        for spec in parts_of(specs_of(model), model, shard):
            parts = [Part(name, rows, columns or range(spec.shape[1])) for name, rows, columns in spec.reads]
            self._enter(spec.target, parts, dtype)
        self._flags = new_flags(len(self._products), device)
        self._flag_of = dict(zip(self._products, self._flags, strict=True))
        self._experts = [
            ExpertsProduct(spec, model, shard, slots, max_rank, dtype, device)
            for spec in (parts_of(expert_specs(model), model, shard) if experts else ())
        ]
        self._layers: dict[int, LayerExperts] = {}
        self._rows: _StepRows | None = None
        self._last: _StepRows | None = None

    def _enter(self, target: str, parts: list[Part], dtype: torch.dtype) -> None:
        _, layer, name = target.split(".")
        modules, sizes = list(dict.fromkeys(part.name for part in parts)), tuple(len(part.rows) for part in parts)
        slices, columns = tuple(modules.index(part.name) for part in parts), len(parts[0].columns)
        pair = new_pair(self.slots, sizes, columns, self.max_rank, dtype, self.device, slices)
        behind = int(layer) == self.model.num_layers - 1 and name not in BEFORE_LAST
        self._products[target] = Product(int(layer), parts, pair, behind)
        if num_tickets(pair) > len(self._tickets):
            self._tickets = torch.zeros(num_tickets(pair), dtype=torch.int32, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Of all slots, and of what the largest step needs beside them."""
        pairs = [product.pair for product in self._products.values()]
        pairs += [product.pair for product in self._experts]
        held = sum(t.numel() * t.itemsize for pair in pairs for t in pair.of_slots)
        step = 4 * self.max_rows * (self.slots + max(product.pair.a.shape[1] for product in self._products.values()))
        return held + step + (step_bytes(self.model, self.max_rows, self._experts[0].pair.rank) if self._experts else 0)

    # ---------------------------------------------------------------- products

    def make(self, weights: DecoderWeights, make: MakeLinear) -> MakeLinear:
        """As `make`, but that the products of `weights` know of adapters."""
        products = {}  # with the weight itself, whose id is then no other's
        for index, layer in enumerate(weights.layers):
            join_gates(layer)
            if (gates := f"layers.{index}.{GATES}") in self._products and GATES not in layer.more:
                qkv = self._products[f"layers.{index}.qkv"]
                self._enter(f"layers.{index}.qkv", qkv.parts + self._products.pop(gates).parts, qkv.pair.a.dtype)
        for target, product in self._products.items():
            layer, name = weights.layers[product.layer], target.rpartition(".")[2]
            if name == "kv_b":
                layer.more["kv_b_adds"], product.made = self._by_head(product), True
            weight = layer.more[name] if name in layer.more else getattr(layer, name)
            products[id(weight)] = weight, product
        for gate_up, down in zip(self._experts[::2], self._experts[1::2], strict=True):
            numbers = partial(self._numbers_of, gate_up.layer == self.model.num_layers - 1)
            adds = self._layers[gate_up.layer] = LayerExperts(gate_up.pair, down.pair, self.slots, numbers)
            weights.layers[gate_up.layer].more["experts_adds"] = adds

        def made(weight: Weight, bias: Tensor | None = None, reduce: Reduce | None = None) -> Linear:
            _, product = products.get(id(weight), (None, None))
            if product is None:
                return make(weight, bias, reduce)
            product.made = True
            return LoraLinear(make(weight, bias, reduce), partial(self.add, product))

        return made

    def _by_head(self, product: Product) -> HeadAdds:
        latent = self.model.latent
        assert latent is not None

        heads = product.pair.b.shape[1] // (latent.nope + latent.value)
        return HeadAdds(product.pair, heads, latent.nope, partial(self._numbers_of, product.behind))

    def _numbers_of(self, behind: bool) -> Tensor | None:
        """Of the rows of a step, or of those `behind` the last attention: 0, or one more than the row's slot."""
        rows = self._last if behind else self._rows
        return None if rows is None else rows.numbers

    def check_made(self) -> None:
        """Raises CheckpointError for a model that runs some of its products in another way."""
        for target, product in self._products.items():
            if not product.made:
                raise CheckpointError(f"adapters: {target} of a {self.model.family} takes none")

    # ---------------------------------------------------------------- rows

    def begin(self, batch: ForwardBatch, wanted: WantedRows | None, fused: bool = False) -> None:
        """The decoder's next layers have these rows; `fused`: in a fused decode step."""
        self._rows = self._last = None
        if batch.adapted:
            self._rows = self._last = self._of(batch)
            if fused and batch.num_rows <= MAX_ROWS:
                self._rows.members = members_of(self._rows.numbers, self.slots)
                self._flags.zero_()
            if wanted is not None:
                self._last = self._of(wanted.batch)

    def _of(self, batch: ForwardBatch) -> _StepRows:
        assert self.table is not None
        numbers = self.table[:, Int.LORA].index_select(0, batch.seq_slots)
        if batch.num_rows != batch.num_seqs:
            numbers = numbers.repeat_interleave(batch.query_start.diff(), output_size=batch.num_rows)
        return _StepRows(numbers, self.slots)

    def add_to(self, target: str, y: Tensor, x: Tensor, **options: Any) -> None:
        """As `add`, by a WeightSpec's target, and with more of add_lora's arguments."""
        self.add(self._products[target], y, x, **options)

    def low_rank(self, target: str, x: Tensor, block_n: int) -> LowRank | None:
        """What the product `target` of x [rows, in], launched next, is to add in a fused decode step; None: it cannot, as of so
        many rows none do, or tiles of block_n outputs do not."""
        pair, members = self._products[target].pair, None if self._rows is None else self._rows.members
        if members is None or not pair.has_whole(block_n):
            return None
        return shrink_few(x, pair, members, self._flag_of[target], self._tickets)

    def of_experts(self, layer: int, rows: int) -> ExpertAdds | None:
        """What adapters add to the products of experts in a step of so many rows; None if none is of experts."""
        return self._layers[layer].of_rows(0, rows) if self._layers else None

    def add(self, product: Product, y: Tensor, x: Tensor, **options: Any) -> None:
        """y [T, out] += what the adapters of the rows x [T, in] make of them; rows of a product that come in several parts come
        in order."""
        rows = self._last if product.behind else self._rows
        if rows is None:
            return
        numbers, groups = rows.next(id(product), len(x))
        if on_gpu(x):
            add_lora(y, x, product.pair, groups(), **options)
        else:
            add_lora_reference(y, x, product.pair, numbers, **options)

    # ---------------------------------------------------------------- slots

    def __getitem__(self, digest: str) -> int:
        return self._numbers[digest]

    def read(self, version: Version) -> AdapterRead:
        """Raises CheckpointError, also when its files have changed since they were named."""
        where, files = Path(version.path), read_files(Path(version.path))
        if files.digest != version.digest:
            raise CheckpointError(f"{where}: its files have changed since they were examined")
        try:
            tensors = tensors_of(files.tensors)
        except SafetensorError as error:
            raise CheckpointError(f"{where / TENSORS}: {error}") from error
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{where / TENSORS}: the tensor {name!r} holds what is no finite number")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        found = check(parsed(files.config, where), shapes, self.modules, self.max_rank, where)
        return AdapterRead(tensors, found, [product.read(tensors, found) for product in self._experts])

    def assign(self, version: Version, slot: int, found: AdapterRead | None = None) -> None:
        """A slot as it is: before the first adapter zeros, which add nothing."""
        self._numbers[version.digest] = slot + 1

    def load(self, version: Version, slot: int, found: AdapterRead) -> None:
        """An adapter that was read into a slot that no request has."""
        tensors, found_matrices, experts = found
        for product in self._products.values():
            pair, first = product.pair, 0
            for whole in pair.of_slots:
                whole[slot].zero_()
            for (index, end), part in zip(pair.runs, product.parts, strict=True):
                if (matrices := found_matrices.get(plain(part.name))) is not None:
                    rank, begin = matrices.rank, index * pair.rank
                    a, b = tensors[matrices.a], tensors[matrices.b]
                    if (order := order_of(part.name, self.model)) is not None:
                        b = b.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
                    pair.a[slot, begin : begin + rank] = a[:, part.columns.start : part.columns.stop].to(self.device)
                    pair.b[slot, first:end, :rank] = b[part.rows.start : part.rows.stop].to(self.device)
                    pair.scales[slot, index] = matrices.scale
                first = end
        for of_experts, placed in zip(self._experts, experts, strict=True):
            of_experts.load(slot, placed)
        self.assign(version, slot)

    def unload(self, digest: str) -> None:
        """Its slot is free; launched steps may still read it, and end before it is written again."""
        self._numbers.pop(digest, None)


class _StepRows:
    """The adapters of a step's rows, whole or in the parts in which a product takes them."""

    def __init__(self, numbers: Tensor, slots: int):
        self.numbers, self._slots = numbers, slots
        self._groups: dict[tuple[int, int], Groups] = {}
        if on_gpu(numbers):  # before the layers: kernels take them for what is long there
            self._groups[0, len(numbers)] = group_rows(numbers, slots)
        self._done: dict[int, int] = {}  # by product: rows that it has had
        self.members: Members | None = None  # of fused decode steps

    def next(self, product: int, count: int):
        """The numbers of the product's next rows, and a function for their groups."""
        begin = self._done.get(product, 0)
        self._done[product] = (begin + count) % len(self.numbers)
        numbers = self.numbers[begin : begin + count]

        def groups() -> Groups:
            if (begin, count) not in self._groups:
                self._groups[begin, count] = group_rows(numbers, self._slots)
            return self._groups[begin, count]

        return numbers, groups
