"""I11: durable contents of the disks of safekeepers, observed from outside after each sync.

The files are decoded here, with the shipped format code, as a power cut would leave them; the
memory of a process is not used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from shalekv.errors import CorruptObject
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import MANIFEST_FOLDER
from shalekv.format.quorum.member_files import (
    HEAD_BYTES,
    Control,
    SegmentHead,
    decode_control,
    encode_head,
)
from shalekv.format.wal_record import decode_record
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum_records import Appended, Joined, LogEnd, Record, ToProposer, Vote
from shalekv.store.safekeeper_log.scan import SEGMENT_SUFFIX
from shalekv.store.safekeeper_log.slots import CONTROL_NAME, SLOT_OFFSETS
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.safekeepers.hosts import DATA, Machine
from tests.sim.simulation import Simulation


class Named(NamedTuple):
    """Identity of a record."""

    lsn: int
    checksum: int


@dataclass(slots=True)
class Held:
    """Durable part of the log on one disk."""

    control: Control
    records: dict[int, Record] = field(default_factory=dict)  # those behind the base, by lsn

    @property
    def member_id(self) -> bytes:
        return self.control.identity.member_id

    @property
    def last(self) -> LogEnd:
        return next(reversed(self.records.values())).mark if self.records else self.control.base


class Witness:
    """Records since when a majority has held each record."""

    def __init__(self, sim: Simulation) -> None:
        self.problems: list[str] = []
        self.records: dict[Named, Record] = {}  # all that were ever durable on a disk
        self.majority_us: dict[Named, int] = {}  # since when a majority has held it
        self.held: dict[str, Held] = {}  # by machine
        self.retired_us: dict[bytes, int] = {}  # since when a member is gone that was on a disk
        self.named_late: list[Member] = []  # named by a manifest that came after they were deleted
        self._sim = sim
        self._folder = ""  # of the database, on each disk; empty: it is not created yet
        self._holders: dict[Named, dict[bytes, None]] = {}  # members
        self._reached: dict[bytes, int] = {}  # by member, the last lsn that it ever held
        self._configurations: list[Configuration] = []
        self._manifests: set[str] = set()
        self._first: dict[Named, Named] = {}
        self._log_read = 0
        self._committed_end = (0, 0)
        self._segments: dict[tuple[str, str], tuple[bytes, list[Record], int]] = {}

    def inspect(self, machine: Machine) -> None:
        """Something was made durable there, or has gone for good."""
        before = self.held.pop(machine.name, None)
        held = self._read(machine)
        if before is not None and (held is None or held.member_id != before.member_id):
            self.retired_us[before.member_id] = self._sim.loop.now_us
        if held is None:
            return
        self.held[machine.name] = held
        member_id = held.member_id
        self._reached[member_id] = max(self._reached.get(member_id, 0), held.last.lsn)
        if before is not None and before.control.identity.member_id == member_id:
            base_lsn = held.control.base.lsn
            for lsn, record in before.records.items():
                kept = held.records.get(lsn)
                if lsn > base_lsn and (kept is None or kept.checksum != record.checksum):
                    self._holders[named(record)].pop(member_id, None)
        known = {} if before is None else before.records
        for lsn, record in held.records.items():
            if known.get(lsn) is not record:
                self._note(record, member_id)

    def reply_sent(self, machine: Machine, reply: ToProposer) -> None:
        """Check a reply of a safekeeper to a writer: what it acknowledges must be on its disk."""
        held = self.held.get(machine.name)
        if not isinstance(reply, Vote | Joined | Appended):
            return
        if held is None:
            self.problems.append(f"I11: {machine.name} says {reply} without a log")
            return
        member_id, promise = held.control.identity.member_id, held.control.promise
        if promise.epoch < reply.ballot.epoch:
            self.problems.append(f"I11: {machine.name} says {reply}, its disk {promise}")
        last_lsn = (
            reply.flushed_lsn
            if isinstance(reply, Appended)
            else reply.last_lsn
            if isinstance(reply, Joined)
            else reply.log.last.lsn
        )
        if self._reached[member_id] < last_lsn:
            self.problems.append(
                f"I11: {machine.name} says {reply}, and its disk ended with "
                f"{self._reached[member_id]} at most"
            )

    @checks(11, "quorum")
    def check_i11_acknowledged_is_on_disk(self) -> None:
        """Check that all that safekeepers acknowledged was on their disks. Raises `Violation`."""
        if self.problems:
            raise Violation(self.problems[0])

    @property
    def committed_end(self) -> tuple[int, int]:
        """The rank of the last record that a majority has held."""
        return self._committed_end

    def chain_to(self, last: Named) -> list[Record]:
        """The records from the first one to this one."""
        found: list[Record] = []
        at: Named | None = last
        while at is not None and at.lsn:
            record = self.records[at]
            found.append(record)
            at = Named(at.lsn - 1, record.previous_checksum)
        return found[::-1]

    def first_of(self, record: Named) -> Named:
        """The first record of the log that this one is in."""
        unknown: list[Named] = []
        at = record
        while at not in self._first and at.lsn > 1:
            unknown.append(at)
            at = Named(at.lsn - 1, self.records[at].previous_checksum)
        first = self._first.get(at, at)
        self._first |= dict.fromkeys([*unknown, at], first)
        return first

    def configurations(self) -> list[Configuration]:
        log = self._sim.store.log
        for each in log[self._log_read :]:
            if each.operation != "create" or each.name in self._manifests:
                continue  # one that is created again, when it was collected, has no effect (F2)
            if each.name.startswith(MANIFEST_FOLDER):
                self._manifests.add(each.name)
                manifest = decode_manifest(each.name, each.data)
                self._folder = manifest.database_id.hex()
                if manifest.wal_members:
                    configuration = Configuration.of(manifest)
                    if not self._configurations or configuration != self._configurations[-1]:
                        self._see_named(configuration, each.at_us)
                        self._configurations.append(configuration)
                        self._recount(configuration, each.at_us)
        self._log_read = len(log)
        return self._configurations

    def _see_named(self, configuration: Configuration, at_us: int) -> None:
        before = self._configurations[-1].everyone if self._configurations else ()
        for member in configuration.everyone:
            if member not in before and self.retired_us.get(member.id, at_us) < at_us:
                self.named_late.append(member)

    def _recount(self, configuration: Configuration, at_us: int) -> None:
        """Recount: after a change of members, others may be a majority that holds a record."""
        for name, holders in self._holders.items():
            if name not in self.majority_us and _is_majority(configuration, holders):
                self._has_majority(name, at_us)

    def _has_majority(self, name: Named, at_us: int) -> None:
        self.majority_us[name] = at_us
        self._committed_end = max(self._committed_end, self.records[name].mark.rank)

    def _note(self, record: Record, member_id: bytes) -> None:
        name = named(record)
        self.records.setdefault(name, record)
        holders = self._holders.setdefault(name, {})
        holders[member_id] = None
        configurations = self.configurations()  # which may show that a majority already has it
        if name not in self.majority_us and any(
            _is_majority(each, holders) for each in configurations
        ):
            self._has_majority(name, self._sim.loop.now_us)

    def _read(self, machine: Machine) -> Held | None:
        """The log on one disk; None: there is no member."""
        folders = machine.disk.durable_folders(DATA)
        self.configurations()
        for name in folders:
            if ".quarantined" in name:
                self.problems.append(f"I11: {machine.name} has lost its promises: {name}")
        if self._folder not in folders:
            return None
        files = machine.disk.durable_files(DATA / self._folder) or {}
        control = _control(files.get(CONTROL_NAME, b""))
        if control is None:
            return None
        held = Held(control)
        last = control.base
        for name in sorted(files):
            if not name.endswith(SEGMENT_SUFFIX):
                continue
            for record in self._segment(machine.name, name, files[name], control):
                if record.lsn <= control.base.lsn:
                    continue
                if not record.follows(last):
                    return held
                held.records[record.lsn] = record
                last = record.mark
        return held

    def _segment(self, machine: str, name: str, data: bytes, control: Control) -> list[Record]:
        """The records of one file, as far as they follow each other."""
        if data[:HEAD_BYTES] != encode_head(
            SegmentHead(control.identity.member_id, control.generation, int(name[:-4]))
        ):
            return []
        was, records, offset = self._segments.get((machine, name), (b"", [], HEAD_BYTES))
        if data is was:
            return records
        if data[:offset] != was[:offset]:
            records, offset = [], HEAD_BYTES
        while True:
            try:
                found = decode_record(name, data, offset)
            except CorruptObject:
                break
            if records and not found.record.follows(records[-1].mark):
                break
            records.append(found.record)
            offset = found.end
        self._segments[machine, name] = (data, records, offset)
        return records


def named(record: Record) -> Named:
    return Named(record.lsn, record.checksum)


def _is_majority(configuration: Configuration, ids: Collection[bytes]) -> bool:
    """Return whether these are a majority, counted without the code that is tested."""
    return all(
        2 * sum(member.id in ids for member in members) > len(members)
        for members in (configuration.members, configuration.next)
        if members
    )


def _control(data: bytes) -> Control | None:
    slots = []
    for offset in SLOT_OFFSETS:
        try:
            slots.append(decode_control(CONTROL_NAME, data, offset))
        except CorruptObject:
            continue
    return max(slots, key=lambda slot: slot.sequence, default=None)
