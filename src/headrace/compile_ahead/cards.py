"""What a kernel's code depends on of a card, for cards that are not there. Shared memory is that of one program."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from headrace.errors import ParameterError
from headrace.machine import cuda_driver

SHARED_MEMORY = {  # bytes that a program may have, by compute capability (CUDA's programming guide)
    80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 120: 99 << 10,
    121: 99 << 10,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Card:
    """`name` is the driver's, by which tables of tiles are found."""

    name: str
    capability: int  # 90: sm_90
    multiprocessors: int
    memory: int  # whole GiB, as the driver gives them to programs

    @property
    def shared_memory(self) -> int:
        return SHARED_MEMORY.get(self.capability, 99 << 10)


CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", 80, 108, 79),
    "a10": Card("NVIDIA A10", 86, 72, 22),
    "a40": Card("NVIDIA A40", 86, 84, 44),
    "a6000": Card("NVIDIA RTX A6000", 86, 84, 47),
    "rtx3090": Card("NVIDIA GeForce RTX 3090", 86, 82, 23),
    "l4": Card("NVIDIA L4", 89, 58, 22),
    "l40s": Card("NVIDIA L40S", 89, 142, 44),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", 89, 128, 23),
    "h100": Card("NVIDIA H100 80GB HBM3", 90, 132, 79),
    "h100-pcie": Card("NVIDIA H100 PCIe", 90, 114, 79),
    "h200": Card("NVIDIA H200", 90, 132, 139),
    "rtx5090": Card("NVIDIA GeForce RTX 5090", 120, 170, 31),
    "rtx-pro-6000": Card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 94),
}


def named_card(name: str) -> Card:
    """By our name or the driver's. Raises ParameterError for one that is not known."""
    wanted = _plain(name)
    if (card := next((card for known, card in CARDS.items() if wanted in (_plain(known), _plain(card.name))), None)) is None:
        raise ParameterError("card", name, "one of " + ", ".join(CARDS))
    return card


def _plain(name: str) -> str:
    return re.sub("nvidia|geforce|[-_ ]", "", name.lower())


def present_card() -> Card | None:
    """The first card that this process may see, asked of the driver itself: no context is made, and torch is not needed."""
    if (driver := cuda_driver()) is None:
        return None
    device, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, 256, device):
        return None
    found, size = [], ctypes.c_size_t()
    if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    for attribute in (75, 76, 16):  # compute capability, major and minor; multiprocessors
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
        found.append(number.value)
    return Card(name.value.decode(errors="replace"), 10 * found[0] + found[1], found[2], size.value >> 30)
