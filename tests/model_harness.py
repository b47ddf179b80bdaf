"""Runs the decoder over paged KV with hand-made batches: sequences in chunks of any size, blocks in shuffled order."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.attention.select import select_attention
from headrace.cache.kv_cache import KVCache
from headrace.cache.state_pool import StatePool
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.linear import make_linear
from headrace.model.weight_names import IGNORED_SUFFIXES


def load_tiny(path: Path) -> tuple[ModelConfig, DecoderWeights]:
    """Config and float32 weights of a tiny checkpoint, straight from weight_plan: the loader's outside witness."""
    config = model_config_from_hf(json.loads((path / "config.json").read_text()))
    files = experts_apart(config, load_file(path / "model.safetensors"))
    tensors, used = {}, set()
    for spec in weight_plan(config):
        if spec.optional and spec.sources[0][0] not in files:
            continue
        used.update(name for name, _ in spec.sources)
        parts = {name: in_usual_order(config, name, files[name]) for name, _ in spec.sources}
        assert [p.shape[0] for p in parts.values()] == [rows for _, rows in spec.sources]
        tensors[spec.target] = torch.cat([parts[name][rows.start : rows.stop] for name, rows, _ in spec.reads])
        assert tensors[spec.target].shape == spec.shape
    unread = {name for name in set(files) - used if not name.endswith(IGNORED_SUFFIXES)}
    assert used <= set(files) and not unread, unread
    return config, DecoderWeights.from_tensors(tensors, config)


def experts_apart(config: ModelConfig, files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors [experts, ...] as the plan names each expert's; of gpt-oss they are [in, out], and gate and up rows take turns."""
    together = {whole for spec in weight_plan(config) for name, _ in spec.sources for whole, _, part in [name.partition("[")] if part}
    found = {name: tensor for name, tensor in files.items() if name not in together}
    for name in together & files.keys():
        for number, part in enumerate(files[name]):
            if config.family == "gpt_oss":
                part = part if name.endswith("_bias") else part.t()
                part = torch.cat([part[0::2], part[1::2]]) if "gate_up" in name else part
            found[f"{name}[{number}]"] = part
    return found


def in_usual_order(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Queries and keys of heads whose rotary pairs are neighbours in the file, pair i at i and i + half of what is rotated."""
    if not config.rope_interleaved or not any(part in name for part in ("q_proj", "k_proj")):
        return tensor
    rotated, rest = tensor.unflatten(0, (-1, config.head_dim)).split([config.rope.dim, config.head_dim - config.rope.dim], 1)
    return torch.cat([rotated[:, 0::2], rotated[:, 1::2], rest], 1).flatten(0, 1)


class Sequences:
    """Some sequences in one paged cache, fed to a decoder in steps; slots and blocks are handed out in random order."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, *,
        max_len: int, num_seqs: int = 4, block_size: int = 4, seed: int = 0, attention=None, make=make_linear, group=None,
    ):  # fmt: skip
        attention = attention or select_attention("torch", config, torch.device("cpu"))[0]
        self.decoder = Decoder(config, weights, attention, max_model_len=max_len, make=make, group=group)
        self.max_blocks = -(-max_len // block_size)
        total = num_seqs * self.max_blocks + 3
        self.kv = KVCache(config, total, block_size, weights.embedding.dtype, torch.device("cpu"))
        for t in self.kv.k + self.kv.v:  # what an earlier request left behind must never be read
            t.fill_(torch.nan)
        if config.delta is not None:
            self.kv.states = StatePool(config.delta, num_seqs + 1, 0, weights.embedding.dtype, torch.device("cpu"))
            for t in (self.kv.states.inputs, self.kv.states.states):
                t.fill_(torch.nan)
        free = list(range(total))
        random.Random(seed).shuffle(free)
        self.tables = torch.zeros(num_seqs + 1, self.max_blocks, dtype=torch.int32)
        for slot in range(num_seqs):
            self.tables[slot] = torch.tensor(free[slot * self.max_blocks : (slot + 1) * self.max_blocks])
        self.lengths = [0] * num_seqs

    @torch.inference_mode()
    def step(self, work: list[tuple[int, list[int]]], wanted: list[list[int]] | None = None) -> list[Tensor]:
        """work: (slot, next token ids) -> logits [n, V] of each entry's rows, or of its `wanted` ones, in the order given."""
        order = sorted(range(len(work)), key=lambda i: len(work[i][1]) != 1)  # decodes first
        slots = [work[i][0] for i in order]
        counts = [len(work[i][1]) for i in order]
        positions = [self.lengths[s] + j for s, n in zip(slots, counts, strict=True) for j in range(n)]
        row_slots = [s for s, n in zip(slots, counts, strict=True) for _ in range(n)]
        size = self.kv.block_size
        places = [int(self.tables[s, p // size]) * size + p % size for s, p in zip(row_slots, positions, strict=True)]
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
        batch = ForwardBatch(
            token_ids=torch.tensor([t for i in order for t in work[i][1]], dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(places),
            block_tables=self.tables,
            seq_slots=torch.tensor(slots, dtype=torch.int32),
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[s] for s in slots], dtype=torch.int32),
            num_decodes=sum(n == 1 for n in counts),
            query_lens=counts,
            context_lens=[self.lengths[s] for s in slots],
        )
        only = None
        if wanted is not None:
            ends = torch.tensor(counts).cumsum(0).tolist()
            rows = [end - n + r for i, end, n in zip(order, ends, counts, strict=True) for r in wanted[i]]
            counts = [len(wanted[i]) for i in order]
            index, contexts = torch.tensor(rows, dtype=torch.int64), [positions[r] + 1 for r in rows]
            only = WantedRows(index, replace(
                batch, token_ids=batch.token_ids[index], positions=batch.positions[index],
                slot_mapping=batch.slot_mapping[index], seq_slots=torch.tensor([row_slots[r] for r in rows], dtype=torch.int32),
                seq_lens=torch.tensor(contexts, dtype=torch.int32), num_decodes=len(rows), query_lens=[1] * len(rows),
                query_start=torch.arange(len(rows) + 1, dtype=torch.int32), context_lens=contexts,
            ))  # fmt: skip
        logits = self.decoder.logits(self.decoder.forward(batch, self.kv, only))
        parts = dict(zip(order, logits.split(counts), strict=True))
        return [parts[i] for i in range(len(work))]
