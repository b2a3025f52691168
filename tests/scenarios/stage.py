"""State of one scenario: the simulation, its processes, their puts, and held requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import MANIFEST_FOLDER, WAL_FOLDER
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.manifest import Manifest
from tests.scenarios.serving import (
    ClientProcess,
    CollectorProcess,
    CompactorProcess,
    CreatorProcess,
    Jobs,
    Options,
    Process,
    Put,
    ReaderProcess,
    ServingProcess,
    WriterProcess,
)
from tests.sim.network import Gate
from tests.sim.simulation import Simulation
from tests.sim.trace import Line

# The format of `tests.sim.network`.
_ARRIVAL = re.compile(
    r"create (?P<name>(?P<folder>wal|manifest)/(?P<id>\d{20})\.\w+) of (?P<sender>[^:]+): "
    r"(?P<outcome>Created|Exists|lost on its way)(?: \((?P<unheard>[\w ]+)\))?"
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
    unheard: str  # why the sender did not get the outcome; empty: it got it

    @property
    def is_success(self) -> bool:
        return self.outcome == "Created"


class Attempts:
    """All attempts of one run."""

    def __init__(self, sim: Simulation) -> None:
        """REQUIRES: nothing was sent yet."""
        self._sim = sim
        sim.loop.trace.keep_all_events()

    def of(self, folder: str) -> list[Attempt]:
        return [attempt for attempt in self._all() if attempt.folder == folder]

    def has_fault(self, request: str, fault: str) -> bool:
        """Return whether a request such as "create wal/1.sst of writer 1: " met `fault`."""
        pattern = f"{request}*{fault}*"
        return any(fnmatchcase(text, pattern) for text in self.at_store())

    def at_store(self) -> list[str]:
        return [line.text for line in self._lines if line.node in STORES]

    @property
    def _lines(self) -> list[Line]:
        return self._sim.loop.trace.events

    def _all(self) -> list[Attempt]:
        created = (
            entry
            for entry in self._sim.store.log
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
                unheard=match["unheard"] or "",
            )
            attempts.append(attempt)
        return attempts


def _epoch_of(folder: str, name: str, data: bytes) -> int:
    if folder == "manifest":
        return decode_manifest(name, data).writer_epoch
    return open_sst(name, data, database_id=None).properties.writer_epoch


KINDS: dict[str, type[Process[Any]]] = {
    "writer": WriterProcess,
    "reader": ReaderProcess,
    "compactor": CompactorProcess,
    "collector": CollectorProcess,
    "client": ClientProcess,
    "process": CreatorProcess,
}
PROCESS = rf"(?P<process>(?:{'|'.join(KINDS)}) \d+)"
OPENER = r"(?P<process>(?:writer|reader|compactor) \d+)"
SERVER = r"(?P<process>(?:writer|reader) \d+)"
WRITER = r"(?P<process>writer \d+)"
WITH = r"(?: with (?P<options>\w+=\w+(?:, \w+=\w+)*))?"
PUT = r"(?P<put>\w+=\w+)"
ERROR = r"(?P<error>[A-Z]\w+)"


class Stage:
    """State that steps act on and compare. Slots are those of the scenario: see `first_slot`."""

    def __init__(self, sim: Simulation) -> None:
        """REQUIRES: nothing was sent yet."""
        self.sim = sim
        self.attempts = Attempts(sim)
        self.processes: dict[str, Process[Any]] = {}
        self.puts: dict[str, Put] = {}  # by "key=value"
        self.snapshots: dict[str, bytes] = {}  # ids by name
        self.gates: dict[str, Gate] = {}  # by the request, in the words of the scenario
        self.faults: dict[str, str] = {}  # fault by request, as the timeline calls them
        self.first_slot = 0  # the WAL id of slot 0 of the scenario
        self.first_attempt = 0  # in the WAL: time 0 of the scenario
        self.listed_attempts = 0  # how many of those in the WAL stood in a table
        self.listed_manifests = 0  # how many of those in the manifest stood in a table
        self.listed_changes: dict[str, int] = {}  # of the store's log, by folder, likewise
        self.listed_records: set[str] = set()  # the destinations of those that stood in a table

    def process(self, name: str) -> Process[Any]:
        """The process of that name, which has begun to do something."""
        return self.processes[name]

    def server(self, name: str) -> ServingProcess[Any]:
        process = self.processes[name]
        assert isinstance(process, ServingProcess)
        return process

    def writer(self, name: str) -> WriterProcess:
        process = self.processes[name]
        assert isinstance(process, WriterProcess)
        return process

    def jobs(self, name: str) -> Jobs[Any]:
        """A process that does jobs; collectors and clients need not be opened."""
        if name not in self.processes and not name.startswith("compactor"):
            self.processes[name] = KINDS[name.split(maxsplit=1)[0]](self.sim, name)
        process = self.processes[name]
        assert isinstance(process, Jobs)
        return process

    def begin(self, name: str, options: str | None) -> None:
        assert name not in self.processes, f"{name} opened before"
        process = self.processes[name] = KINDS[name.split(maxsplit=1)[0]](self.sim, name)
        assert isinstance(process, ServingProcess | CompactorProcess)
        process.begin_open(read_options(options))

    def wal_name(self, slot: int) -> str:
        return names.wal_name(self.first_slot + slot)

    def level_names(self) -> list[str]:
        """All objects that were ever in the levels, by the order of their creation."""
        log = self.sim.store.log
        created = [entry.name for entry in log if entry.operation == "create"]
        return [name for name in dict.fromkeys(created) if name.startswith(names.LEVELS_FOLDER)]

    def shown(self, name: str) -> str:
        """Return the scenario's name of an object: its slot, or for the levels its number."""
        wal_id, sst_id = names.parse_wal_name(name), names.parse_level_name(name)
        if wal_id is not None:
            return f"{names.WAL_FOLDER}{wal_id - self.first_slot:020d}.sst"
        if sst_id is not None:
            return f"{names.LEVELS_FOLDER}{1 + self.level_names().index(name)}.sst"
        return name

    def wal(self) -> list[Sst]:
        found = self.sim.store.names(names.WAL_FOLDER)
        ours = [name for name in found if names.parse_wal_name(name) is not None]
        return [open_sst(name, self.data(name), database_id=None) for name in ours]

    def manifest(self, manifest_id: int) -> Manifest:
        name = names.manifest_name(manifest_id)
        return decode_manifest(name, self.data(name))

    def manifest_ids(self) -> list[int]:
        found = map(names.parse_manifest_name, self.sim.store.names(names.MANIFEST_FOLDER))
        return [manifest_id for manifest_id in found if manifest_id is not None]

    def current(self) -> Manifest:
        return self.manifest(self.manifest_ids()[-1])

    def asked_for(self, process: str, request: str, since: int) -> list[str]:
        """Return the objects that a process has requested in this way since that event."""
        pattern = re.compile(rf"{request} (\S+) of {process}: .*")
        texts = [text for text in self.attempts.at_store()[since:] if pattern.fullmatch(text)]
        return [self.shown(text.split()[1]) for text in texts]

    def check_all_is_resolved(self) -> None:
        """Fail if an event is not in the scenario, or the reverse."""
        for put, outcome in self.puts.items():
            assert outcome.is_resolved or outcome.is_lost, (
                f"nothing is said about {put}, which is {outcome.now()}"
            )
        for name, process in self.processes.items():
            error = process.error_now()
            assert process.is_resolved or error is None, f"{name} has failed: {error}"
            is_unsaid = isinstance(process, Jobs) and not process.is_resolved and process.node.alive
            assert not is_unsaid, f"nothing is said about what {name} does"
        for request, gate in self.gates.items():
            assert gate.arrived_count, f"{request} never arrived"
        for request, fault in self.faults.items():
            assert self.attempts.has_fault(request, fault), f"no {request} was {fault}"

    def data(self, name: str) -> bytes:
        data = self.sim.store.data(name)
        assert data is not None, f"{name} is not there"
        return data


def read_options(options: str | None) -> Options:
    return dict(pair.split("=") for pair in options.split(", ")) if options else {}
