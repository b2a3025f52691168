"""Counts of the calls of one process to a store, by operation and folder.

`RequestCounts` in `shalekv.store.api` counts what these calls send, by classes of price.
Counting costs about a microsecond for a call, so every store that is opened counts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shalekv.errors import StoreBroken, StoreUnavailable
from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER
from shalekv.store.api import CreateOutcome, Unknown


class Operation(enum.StrEnum):
    """The methods of a store."""

    CREATE = "create"
    GET = "get"
    GET_RANGE = "get_range"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"
    NOW_MS = "now_ms"
    REPAIR = "recover"  # its name in the replies of `Admin.Status`


@dataclass(slots=True)
class Count:
    """Totals of one operation. To count a call, it is made in a ``with`` block of its `Count`."""

    requests: int = 0  # calls begun; a list counts once, however many pages it has
    failures: int = 0  # calls that ended without an answer: unavailable, broken, unknown
    objects: int = 0  # objects created, read, listed, or requested to be deleted
    transferred_bytes: int = 0  # contents sent by creates and received by reads

    def answered(self, outcome: CreateOutcome) -> None:
        """Count the outcome of a create."""
        if isinstance(outcome, Unknown):
            self.failures += 1
        else:
            self.objects += 1

    def received(self, data: bytes) -> None:
        """Count an object, of which `data` was read."""
        self.objects += 1
        self.transferred_bytes += len(data)

    def __enter__(self) -> None:
        """Count a call."""
        self.requests += 1

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Count a failure, if the call ended without an answer."""
        if isinstance(error, StoreUnavailable | StoreBroken):
            self.failures += 1


FOLDERS = tuple(name.rstrip("/") for name in (MANIFEST_FOLDER, WAL_FOLDER, LEVELS_FOLDER))


class StoreCallCounts:
    """Counts of calls to one store; the numbers only grow."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Operation, str], Count] = {}

    @property
    def by_folder(self) -> Mapping[tuple[Operation, str], Count]:
        """A live view of the counts by operation and folder.

        The folder is one of `FOLDERS`, or "" for names elsewhere, and for names of several folders.
        """
        return MappingProxyType(self._counts)

    def of(self, operation: Operation, name: str = "") -> Count:
        """Return the count for calls of `operation` with `name`, an object or a folder."""
        folder = name.partition("/")[0]
        key = (operation, folder if folder in FOLDERS else "")
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = Count()
        return count

    def of_many(self, operation: Operation, names: tuple[str, ...]) -> Count:
        """Return the count for calls of `operation` with these names at once."""
        folders = {name.partition("/")[0] for name in names}
        return self.of(operation, folders.pop() if len(folders) == 1 else "")
