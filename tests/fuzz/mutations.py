"""What becomes of bytes on their way: bits that flip, cuts, insertions, pieces of another thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

# Numbers that make lengths, counts and offsets absurd, or pass them by one.
_ABSURD = (0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
_WIDTHS = (1, 2, 4, 8)

Change = Callable[[bytes], bytes]


def absurd_numbers() -> list[bytes]:
    """Each of the numbers in each width that it fits."""
    return [
        number.to_bytes(width, "little")
        for width in _WIDTHS
        for number in _ABSURD
        if number < 2 ** (8 * width)
    ]


def overwritten(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with `new` instead of what stands at `at`; never longer than it was."""
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit changed, counted from the first byte's least significant."""
    return overwritten(data, bit // 8, bytes([data[bit // 8] ^ 1 << bit % 8]))


def changes(others: Sequence[bytes]) -> st.SearchStrategy[Change]:
    """One change of any kind; `others` are what pieces may come from."""
    at = st.integers(0, 2**16)
    few = st.binary(min_size=1, max_size=9)
    return st.one_of(
        st.builds(_flip, at),
        st.builds(_flip, at),
        st.builds(_overwrite, at, st.sampled_from(absurd_numbers()) | few),
        st.builds(_cut, at),
        st.builds(_cut_out, at, st.integers(1, 64)),
        st.builds(_insert, at, few | st.just(bytes(64))),
        st.builds(_repeat, at, st.integers(1, 64)),
        st.builds(_splice, at, at, st.sampled_from(list(others))),
        st.builds(_transplant, at, st.integers(1, 64), st.sampled_from(list(others))),
    )


def mutants(samples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """What became of a sample by a few changes."""

    def changed(data: bytes, steps: list[Change]) -> bytes:
        for step in steps:
            data = step(data)
        return data

    steps = st.lists(changes(samples), min_size=1, max_size=4)
    return st.builds(changed, st.sampled_from(list(samples)), steps)


def _flip(bit: int) -> Change:
    return lambda data: flipped(data, bit % (8 * len(data))) if data else data


def _overwrite(at: int, new: bytes) -> Change:
    return lambda data: overwritten(data, at % len(data), new) if data else new


def _cut(at: int) -> Change:
    return lambda data: data[: at % (len(data) + 1)]


def _cut_out(at: int, length: int) -> Change:
    def change(data: bytes) -> bytes:
        first = at % (len(data) + 1)
        return data[:first] + data[first + length :]

    return change


def _insert(at: int, new: bytes) -> Change:
    def change(data: bytes) -> bytes:
        first = at % (len(data) + 1)
        return data[:first] + new + data[first:]

    return change


def _repeat(at: int, length: int) -> Change:
    def change(data: bytes) -> bytes:
        first = at % (len(data) + 1)
        return data[: first + length] + data[first:]

    return change


def _splice(at: int, other_at: int, other: bytes) -> Change:
    """The beginning of one, and the end of another."""

    def change(data: bytes) -> bytes:
        return data[: at % (len(data) + 1)] + other[other_at % (len(other) + 1) :]

    return change


def _transplant(at: int, length: int, other: bytes) -> Change:
    """What stands at the same place of another."""

    def change(data: bytes) -> bytes:
        first = at % (len(data) + 1)
        return overwritten(data, first, other[first : first + length])

    return change
