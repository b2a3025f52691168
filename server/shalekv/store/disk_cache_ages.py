"""How old the files of a cache are, in little memory: which to delete to make room."""

from __future__ import annotations

from dataclasses import dataclass

CLASSES_MAX = 16_384


@dataclass(slots=True)
class Cut:
    """Files before `from_ms` go, and of those before `until_ms` what `left_bytes` asks for."""

    from_ms: int
    until_ms: int
    left_bytes: int

    def takes(self, used_ms: int, size_bytes: int) -> bool:
        """Whether this file goes."""
        if used_ms < self.from_ms:
            return True
        if used_ms >= self.until_ms or self.left_bytes <= 0:
            return False
        self.left_bytes -= size_bytes
        return True


class Ages:
    """Bytes by the time of their last use, in classes that get longer as they get many."""

    def __init__(self, classes_max: int = CLASSES_MAX) -> None:
        self._classes_max = classes_max
        self._shift = 0  # a class is 2 to the power of this, in milliseconds
        self._bytes: dict[int, int] = {}
        self.total_bytes = 0

    @property
    def class_ms(self) -> int:
        """How exactly times are told apart."""
        return 1 << self._shift

    def add(self, used_ms: int, size_bytes: int) -> None:
        """Count a file."""
        self.total_bytes += size_bytes
        self._add(used_ms >> self._shift, size_bytes)
        while len(self._bytes) > self._classes_max:
            finer, self._bytes = self._bytes, {}
            self._shift += 1
            for number, sum_bytes in finer.items():
                self._add(number >> 1, sum_bytes)

    def cut(self, size_bytes: int) -> Cut:
        """What to delete so that so many bytes are free: what was used longest ago."""
        left_bytes = size_bytes
        for number in sorted(self._bytes):
            if left_bytes <= self._bytes[number]:
                return Cut(number << self._shift, number + 1 << self._shift, left_bytes)
            left_bytes -= self._bytes[number]
        end_ms = max(self._bytes, default=0) + 1 << self._shift
        return Cut(end_ms, end_ms, 0)

    def _add(self, number: int, size_bytes: int) -> None:
        self._bytes[number] = self._bytes.get(number, 0) + size_bytes
