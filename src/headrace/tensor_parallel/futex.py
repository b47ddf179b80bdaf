"""Waiting for a number in shared memory to change, by Linux's futexes: nobody burns a core, and no wake-up is lost."""

from __future__ import annotations

import ctypes
import platform

from headrace.errors import ParameterError

CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # the system call's number
WAIT, WAKE = 0, 1
EVERYBODY = 2**31 - 1


def check_machine(ranks: int) -> None:
    """Raises ParameterError where processes of several ranks cannot be kept in step."""
    system, machine = platform.system(), platform.machine()
    if ranks > 1 and (system != "Linux" or machine not in CALL):
        raise ParameterError("tensor_parallel_size", ranks, f"1 on {system} {machine}: more needs Linux on x86-64 or arm64")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The words [N] uint32 of a writable buffer, for processes that share it."""

    def __init__(self, buffer: memoryview):
        machine = platform.machine()
        self.words = buffer.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._number = ctypes.c_long(CALL[machine])
        self._call = ctypes.CDLL(None).syscall
        self._call.argtypes = (
            ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec), ctypes.c_void_p,
            ctypes.c_uint32,
        )  # fmt: skip
        self._ordered = machine == "x86_64"  # stores are seen in their order, and loads done in theirs

    def wait(self, index: int, value: int, seconds: float) -> None:
        """Until somebody wakes those who wait for the word, it has another value, or the time is over; now and then earlier."""
        timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._call(self._number, self._address + 4 * index, WAIT, value, ctypes.byref(timeout), None, 0)

    def wake(self, index: int) -> None:
        """Everybody who waits for the word, which has been changed."""
        self._call(self._number, self._address + 4 * index, WAKE, EVERYBODY, None, None, 0)

    def fence(self, index: int) -> None:
        """What this process does in memory before is done before what it does afterwards."""
        if not self._ordered:
            self.wake(index)  # the kernel has a full barrier there
