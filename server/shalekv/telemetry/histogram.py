"""Histograms with buckets of powers of two, which cost two additions and a shift a value."""

from __future__ import annotations

from collections.abc import Iterable

# Bucket n counts values of 2**n and more; the first one, also less; the last has no upper bound.
BUCKET_COUNT = 32


class Histogram:
    """Counts of whole numbers, such as microseconds, bytes, or commits."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        """Begin without values."""
        self.buckets = [0] * BUCKET_COUNT
        self.total = 0  # the sum of the values

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.buckets)

    def add(self, value: int) -> None:
        """Count a value, which is not negative."""
        self.total += value
        try:
            self.buckets[(value | 1).bit_length() - 1] += 1
        except IndexError:
            self.buckets[-1] += 1

    def merge(self, buckets: Iterable[int], total: int) -> None:
        """Add the values of another histogram, given by its buckets, of which some may be left out
        at the end.
        """
        self.total += total
        for number, count in enumerate(buckets):
            self.buckets[number] += count

    def encoded(self) -> tuple[int, list[int]]:
        """Return the sum of the values, and the buckets, without empty ones at the end."""
        used = BUCKET_COUNT
        while used and not self.buckets[used - 1]:
            used -= 1
        return self.total, self.buckets[:used]
