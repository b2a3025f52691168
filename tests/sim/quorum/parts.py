"""Parts of a simulated database with safekeepers: nodes, writers, and streams between them.

`schedule` decides which events happen to them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from random import Random
from typing import TypeVar

from shalekv.protocol.membership import Member
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth, LogShape, Record, ToProposer
from tests.sim.quorum.judge import Judge, Violation
from tests.sim.quorum.safekeeper import Bucket, Safekeeper
from tests.sim.quorum.writer import Stream, Writer


def text_of(part: object) -> str:
    match part:
        case LogEnd():
            return f"{part.epoch}.{part.lsn}"
        case LogShape():
            runs = (f"{first}-{last.lsn} of epoch {last.epoch}" for first, last in part.sections)
            return f"[behind {text_of(part.base)}: {', '.join(runs)}]"
        case Record():
            return f"{part.lsn}:{part.payload.decode()}"
        case Ballot():
            return f"{part.epoch}/{part.nonce.decode().lstrip('0')}"
        case tuple():
            return f"({' '.join(map(text_of, part))})"
        case bytes():
            return part.decode(errors="replace").lstrip("0")
        case enum.Enum():
            return str(part.value)
        case _ if is_dataclass(part) and not isinstance(part, type):
            values = (f"{each.name}={text_of(getattr(part, each.name))}" for each in fields(part))
            return f"{type(part).__name__}({', '.join(values)})"
    return str(part)


_ALWAYS: Mapping[str, float] = {
    "burst": 30,
    "write": 15,
    "arrive_late": 2,
    "work": 2,
    "connect": 1,
    "break_stream": 0.5,
    "crash": 0.5,
    "start": 6,
    "archive": 1,
    "trim": 1,
    "poll_manifest": 1,
    "broadcast": 0.5,
    "stop_writer": 0.3,
    "fill_disk": 0.1,
}
_THEMES: Mapping[str, Mapping[str, float]] = {
    "rivals": {"open": 8, "stop_writer": 2, "archive": 0, "trim": 0, "work": 0},
    "disks": {"open": 8, "crash": 3, "stop_writer": 1.5, "archive": 0.3, "trim": 0.3},
    "damages": {"open": 3, "damage": 4, "wipe": 0.5, "crash": 2},
    "streams": {
        "open": 2,
        "connect": 10,
        "arrive_late": 15,
        "relay": 4,
        "broadcast": 4,
        "break_stream": 2,
    },
    "archive": {"open": 4, "archive": 6, "trim": 4, "archive_all": 3, "stop_writer": 1},
    "members": {"open": 3, "change_members": 8, "poll_manifest": 3, "wipe": 1},
    "everything": {
        "open": 3,
        "crash": 2,
        "damage": 1,
        "wipe": 0.5,
        "arrive_late": 5,
        "connect": 3,
        "relay": 3,
        "archive": 4,
        "trim": 4,
        "archive_all": 0.5,
        "change_members": 2,
    },
}

# Weight of each event. Its name is that of a method of `QuorumSchedule`, without the underscore.
THEMES: Mapping[str, Mapping[str, float]] = {
    theme: {**_ALWAYS, **weights} for theme, weights in _THEMES.items()
}


T = TypeVar("T")


class Parts:
    """All parts, and the events up to now."""

    def __init__(self, seed: int) -> None:
        """Create three or five members, up to two more nodes, and no writer."""
        self.random = Random(seed)
        self.count_max = self.random.choice((1, 2, 1_000))  # records in one append
        self.judge = Judge()
        self._events: list[tuple[object, ...]] = []
        self._ids = 0
        self._payloads = 0
        count = self.random.choice((3, 3, 5))
        self.nodes = [self._node(f"s{n}") for n in range(count + self.random.choice((0, 1, 2)))]
        self.bucket = Bucket([node.member for node in self.nodes[:count]], self.judge)
        self.writers: list[Writer] = []
        self._is_wild = True
        self._bad: set[str] = set()  # a record on the disk of these was damaged since they stopped
        self._arrived: dict[tuple[str, int], Stream] = {}

    def _deliver_on(self, stream: Stream) -> None:
        node = next(node for node in self.nodes if node.name == stream.member.address)
        is_there = stream.number is None or self._arrived.get((node.name, stream.number)) is stream
        if not node.is_up or not is_there:
            stream.is_open = False
            stream.there.clear()
            return
        if stream.number is None:
            stream.number = node.open_stream()
            self._arrived[node.name, stream.number] = stream
        message = stream.there.popleft()
        self._note(node.name, "<-", stream.writer.name, "on", stream.number, message)
        node.receive(stream.number, message)

    def _answer_on(self, stream: Stream) -> None:
        message = stream.back.popleft()
        writer = stream.writer
        self._note(writer.name, "<-", stream.member.address, "on", stream.number, message)
        writer.receive(stream, message)
        self._go_on(writer)

    def _go_on(self, writer: Writer) -> None:
        if not writer.is_live:
            return
        if writer.may_claim:
            self._claim(writer)
        if writer.has_won:
            writer.lead(self._fetch, archive_tip=self.bucket.archive_tip)
            if writer.leader is not None:
                self._note(writer.name, "leads with", writer.log)

    def _claim(self, writer: Writer) -> None:
        manifest = self.bucket.manifest
        epoch = writer.epoch_to_claim(manifest)
        if (
            self._is_wild
            and self.random.random() < 0.1
            and epoch == manifest.writer_epoch + 1
            and epoch > 1
        ):
            # It claims an epoch that another has won: its own edit has a recycled id.
            epoch = manifest.writer_epoch
        else:
            self.bucket.claim(epoch, writer.nonce)
        self._note(f"{writer.name} claims epoch {epoch} with nonce {writer.nonce!r}")
        writer.claimed(epoch, manifest)

    def _new_writer(self) -> Writer:
        number = len(self.writers)
        writer = Writer(
            f"w{number}", b"%016d" % number, self.bucket.manifest, self.judge, self.count_max
        )
        self.writers.append(writer)
        self._note(f"{writer.name} opens")
        return writer

    def _end_there(self, stream: Stream) -> None:
        stream.there.clear()
        if stream.number is not None:
            node = next(node for node in self.nodes if node.name == stream.member.address)
            if self._arrived.pop((node.name, stream.number), None) is stream:
                node.disconnected(stream.number)

    def _stop(self, node: Safekeeper) -> None:
        node.crash(self.random, is_power_lost=self.random.random() < 0.7)
        self._arrived = {key: s for key, s in self._arrived.items() if key[0] != node.name}

    def _start_one(self, node: Safekeeper) -> None:
        was_sound = node.disk.health is LogHealth.SOUND
        node.start()
        self.judge.started(node.name, node.disk.base, node.readable())
        self._note(node.name, "starts with", node.state)
        if was_sound and node.disk.health is LogHealth.DAMAGED and node.name not in self._bad:
            raise Violation(f"I13: {node.name} believes that its log was damaged, and none was")
        self._bad.discard(node.name)

    def _lossy_count(self, besides: Safekeeper) -> int:
        """Count the other members that don't vote.

        A majority that has lost its logs is another matter.
        """
        members = {node.member_id: node for node in self.nodes if node is not besides}
        manifest = self.bucket.manifest
        texts = {*manifest.wal_members, *manifest.wal_members_next}
        ids = [Member.parse(text).id for text in texts]
        others = [each for each in ids if each != besides.member_id]
        return sum(
            member_id not in members or members[member_id].disk.health is not LogHealth.SOUND
            for member_id in others
        )

    def _fetch(self, member: Member) -> Sequence[Record] | None:
        node = next(node for node in self.nodes if node.name == member.address)
        return node.readable() if node.is_up and node.member_id == member.id else None

    def _leaders(self) -> list[Writer]:
        return [w for w in self.writers if w.is_live and w.leader is not None]

    def _streams(self) -> list[Stream]:
        return [s for writer in self.writers for s in writer.streams if s.is_open or s.there]

    def _node(self, name: str) -> Safekeeper:
        def send(number: int, message: ToProposer) -> None:
            stream = self._arrived.get((name, number))
            if stream is not None:
                stream.back.append(message)

        return Safekeeper(name, self._new_id(), self.judge, send)

    def _new_id(self) -> bytes:
        self._ids += 1
        return b"%016d" % self._ids

    def _some(self, options: Sequence[T]) -> T | None:
        return self.random.choice(options) if options else None

    def _note(self, *parts: object) -> None:
        self._events.append(parts)

    def timeline(self, last: int) -> str:
        """The last of what has happened, to be read by people."""
        return "\n".join(" ".join(map(text_of, parts)) for parts in self._events[-last:])
