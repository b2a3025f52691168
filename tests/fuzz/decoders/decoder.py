"""A decoder for the fuzzer, and the rules by which its results are judged."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shalekv.errors import CorruptObject

Decode = Callable[[bytes], object]
Reseal = Callable[[bytes], bytes]

MEMORY_AT_LEAST = 1 << 20  # buffers, caches and messages of errors
MEMORY_FOR_A_BYTE = 400  # for each byte of an input: an object of Python for every few bytes
MEMORY_FOR_A_COMPRESSED_BYTE = 2 * 2**15  # the maximum of the format, and once more to copy it
CALLS_AT_LEAST = 2_000
CALLS_FOR_A_BYTE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder, with encodings that it takes.

    Where `covers` names several functions, `decode` calls them all. What it returns is compared:
    so it must hold all that was decoded.
    """

    name: str
    covers: tuple[Callable[..., object], ...]
    decode: Decode
    samples: Sequence[bytes]
    errors: tuple[type[Exception], ...] = (CorruptObject,)
    refused: object = ()  # its result for refused input, if it does not raise an error
    is_sealed: bool = False  # a checksum covers every bit
    reseal: Reseal | None = None  # makes the checksums of a forged encoding match
    is_compressed: bool = False
    found: Sequence[bytes] = ()  # inputs that failed when a check was missing

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed error."""

    error: Exception


def outcome(decoder: Decoder, data: bytes) -> object:
    """Return the result of a decoder for `data`; a documented error is a `Refusal`, any other is
    raised.
    """
    try:
        return decoder.decode(data)
    except decoder.errors as error:
        str(error)  # a message that cannot be made is another error
        return Refusal(error)


def is_refused(decoder: Decoder, found: object) -> bool:
    return isinstance(found, Refusal) or (decoder.refused != () and found == decoder.refused)


def check_cost(decoder: Decoder, data: bytes) -> None:
    """Memory and work of a decoder are bounded by the length of what it is given.

    A figure beyond the bound is measured again. What a decoder needs, it needs each time; but the
    tables of the whole process, such as that of interned strings, grow in some measurement or
    other: by 7 MB at once in a process with many modules.
    """
    rate = MEMORY_FOR_A_COMPRESSED_BYTE if decoder.is_compressed else MEMORY_FOR_A_BYTE
    bound_bytes = MEMORY_AT_LEAST + rate * len(data)
    peak_bytes = _peak_bytes(decoder, data)
    if peak_bytes > bound_bytes:
        peak_bytes = min(peak_bytes, _peak_bytes(decoder, data))
    assert peak_bytes <= bound_bytes, f"{peak_bytes} bytes of memory for {len(data)}"


def _peak_bytes(decoder: Decoder, data: bytes) -> int:
    """Return the most memory that the process has taken for a call of the decoder, and check the
    calls that it makes.

    No garbage is collected meanwhile: that of earlier tests could make calls when it goes.
    """
    calls = _Calls(CALLS_AT_LEAST + CALLS_FOR_A_BYTE * len(data))
    gc.disable()
    tracemalloc.start()
    sys.setprofile(calls.count)
    try:
        outcome(decoder, data)
    finally:
        sys.setprofile(None)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.enable()
    return peak_bytes


class TooMuchWork(Exception):
    """A decoder does not come to an end, or far too late."""


class _Calls:
    """Counts calls, of functions of ours and of the interpreter's, and ends what makes too many."""

    def __init__(self, most: int) -> None:
        self._left = most

    def count(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in {"call", "c_call"}:
            self._left -= 1
            if self._left == 0:
                raise TooMuchWork
