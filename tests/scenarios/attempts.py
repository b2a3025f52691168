"""What was tried at the store: every create that arrived there, in order, with its outcome.

It is read from the timeline of the simulation, where creates that failed stand as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shalekv.format.manifest import decode_manifest
from shalekv.format.names import MANIFEST_FOLDER, WAL_FOLDER
from shalekv.format.sst import open_sst
from tests.sim.trace import Line
from tests.sim.world import World

# As `tests.sim.network` notes them.
_ARRIVAL = re.compile(
    r"create (?P<name>(?P<folder>wal|manifest)/(?P<id>\d{20})\.\w+) of (?P<sender>[^:]+): "
    r"(?P<outcome>Created|Exists|lost on its way)(?: \((?P<told>[\w ]+)\))?"
)
STORES = frozenset({"store", "records"})
_FOLDERS = (WAL_FOLDER, MANIFEST_FOLDER)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A create that arrived at the store, or was lost before it."""

    folder: str  # "wal" or "manifest"
    object_id: int
    sender: str  # such as "writer 2"
    epoch: int  # of the sender
    outcome: str  # "Created", "Exists" or "lost on its way"
    told: str  # what kept the sender from hearing of the outcome; empty: nothing did

    @property
    def is_success(self) -> bool:
        """Whether it created the object."""
        return self.outcome == "Created"


class Attempts:
    """All attempts of one run."""

    def __init__(self, world: World) -> None:
        """REQUIRES: nothing was sent yet."""
        self._world = world
        world.loop.trace.keep_all_events()

    def of(self, folder: str) -> list[Attempt]:
        """The attempts in the folder "wal" or "manifest"."""
        return [attempt for attempt in self._all() if attempt.folder == folder]

    def has_fault(self, request: str, fault: str) -> bool:
        """Whether a request such as "create wal/1.sst of writer 1: " met `fault`."""
        pattern = f"{request}*{fault}*"
        return any(fnmatchcase(text, pattern) for text in self.at_store())

    def at_store(self) -> list[str]:
        """What was noted at the store, of every request that arrived."""
        return [line.text for line in self._lines if line.node in STORES]

    @property
    def _lines(self) -> list[Line]:
        return self._world.loop.trace.events

    def _all(self) -> list[Attempt]:
        created = (
            entry
            for entry in self._world.store.log
            if entry.operation == "create" and entry.name.startswith(_FOLDERS)
        )
        epochs: dict[str, int] = {}  # of each sender
        attempts = []
        for line in self._lines:
            match = _ARRIVAL.fullmatch(line.text) if line.node == "store" else None
            if match is None:
                continue
            sender = match["sender"]
            if match["outcome"] == "Created":
                epochs[sender] = _epoch_of(match["folder"], match["name"], next(created).data)
            attempt = Attempt(
                folder=match["folder"],
                object_id=int(match["id"]),
                sender=sender,
                epoch=epochs.get(sender, 0),
                outcome=match["outcome"],
                told=match["told"] or "",
            )
            attempts.append(attempt)
        return attempts


def _epoch_of(folder: str, name: str, data: bytes) -> int:
    """The writer epoch that stands in an object."""
    if folder == "manifest":
        return decode_manifest(name, data).writer_epoch
    return open_sst(name, data, database_id=None).properties.writer_epoch
