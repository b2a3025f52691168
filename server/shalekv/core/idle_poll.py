"""How long to wait between two looks at something that may not change for days."""

from __future__ import annotations


class IdlePoll:
    """Waits that double from `first_ms` to `longest_ms` while every look sees the same.

    So what happens is noticed soon while something happens, and an idle database costs little.
    """

    def __init__(self, first_ms: float, longest_ms: float, *, patience: int = 0) -> None:
        """`longest_ms` below `first_ms` means `first_ms`.

        So many looks as `patience` may see the same before the waits begin to double.
        """
        self._first_ms = first_ms
        self._longest_ms = max(first_ms, longest_ms)
        self._patience = patience
        self._same = 0  # looks that saw the same
        self._seen: object = None
        self.wait_ms = first_ms

    def begin_again(self) -> None:
        """Something is about to happen: look often for a while."""
        self._same = 0
        self.wait_ms = self._first_ms

    def look(self, seen: object) -> None:
        """Set `wait_ms` after a look at what is now `seen`."""
        self._same = self._same + 1 if seen == self._seen else 0
        self._seen = seen
        if not self._same:
            self.wait_ms = self._first_ms
        elif self._same > self._patience:
            self.wait_ms = min(2 * self.wait_ms, self._longest_ms)
