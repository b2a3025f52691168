"""Damage to bytes: flipped bits, cuts, insertions, parts of another sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

# Numbers that make lengths, counts and offsets absurd, or pass them by one.
_ABSURD = (0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
ABSURD_NUMBERS = [
    number.to_bytes(width, "little")
    for width in (1, 2, 4, 8)
    for number in _ABSURD
    if number < 2 ** (8 * width)
]
FEW_BYTES = 64


def overwritten(data: bytes, at: int, new: bytes) -> bytes:
    """Return `data` with `new` at `at`; never longer than it was."""
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit changed, counted from the first byte's least significant."""
    return overwritten(data, bit // 8, bytes([data[bit // 8] ^ 1 << bit % 8]))


def mutant(random: Random, samples: Sequence[bytes]) -> bytes:
    """Return a sample after a few changes; inserted parts may come from the others."""
    data = random.choice(samples)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        data = random.choice(_CHANGES)(random, data, at, random.choice(samples))
    return data


def _some(random: Random) -> int:
    return random.randint(1, FEW_BYTES)


def _few(random: Random) -> bytes:
    return random.choice((random.choice(ABSURD_NUMBERS), random.randbytes(9), bytes(FEW_BYTES)))


def _flip(random: Random, data: bytes, _at: int, _other: bytes) -> bytes:
    return flipped(data, random.randrange(8 * len(data))) if data else data


def _transplant(random: Random, data: bytes, at: int, other: bytes) -> bytes:
    return overwritten(data, at, other[at : at + _some(random)])


# Each gets a position, and another sample.
_CHANGES: tuple[Callable[[Random, bytes, int, bytes], bytes], ...] = (
    _flip,
    _flip,
    _transplant,
    lambda random, data, at, _: overwritten(data, at, _few(random)),
    lambda _random, data, at, _: data[:at],
    lambda random, data, at, _: data[:at] + data[at + _some(random) :],
    lambda random, data, at, _: data[:at] + _few(random) + data[at:],
    lambda random, data, at, _: data[: at + _some(random)] + data[at:],
    lambda random, data, at, other: data[:at] + other[random.randrange(len(other) + 1) :],
)
