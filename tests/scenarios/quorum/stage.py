"""The parts of a quorum scenario: nothing moves but what a sentence moves."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.protocol.fencing import FenceRun
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Member
from shalekv.protocol.quorum_records import Record, ToProposer
from tests.sim.quorum.judge import Disk, Judge
from tests.sim.quorum.safekeeper import Bucket, Safekeeper
from tests.sim.quorum.writer import Stream, Writer


class Stage:
    """Safekeepers by letter, writers by number. The judge's invariants hold at every moment."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.nodes: dict[str, Safekeeper] = {}
        self.writers: dict[str, Writer] = {}
        self.records: dict[str, Record] = {}  # by payload
        self.bucket = Bucket((), self.judge)
        self.copies: dict[str, Disk] = {}  # of disks, by node
        self.runs: dict[str, FenceRun] = {}  # of writers in the object store
        self._arrived: dict[tuple[str, int], Stream] = {}
        self._ids = 0

    def add_node(self, name: str) -> Safekeeper:
        def send(number: int, message: ToProposer) -> None:
            self._arrived[name, number].back.append(message)

        self.nodes[name] = Safekeeper(name, self.new_id(), self.judge, send)
        return self.nodes[name]

    def new_id(self) -> bytes:
        self._ids += 1
        return b"%016d" % self._ids

    def begin(self, names: Sequence[str], *, mode: WalMode = WalMode.QUORUM) -> None:
        members = [self.add_node(name).member for name in names]
        self.bucket = Bucket(members, self.judge, mode)

    def writer(self, name: str) -> Writer:
        """The writer of this number: a new one has read the manifest."""
        if name not in self.writers:
            nonce = name.encode().rjust(16, b"0")
            self.writers[name] = Writer(
                f"writer {name}", nonce, self.bucket.manifest, self.judge, count_max=1
            )
        return self.writers[name]

    def stream(self, writer: Writer, node: str) -> Stream:
        found = [s for s in writer.streams if s.member.address == node and s.is_open]
        assert found, f"{writer.name} has no stream to {node}"
        return found[-1]

    def connect(self, writer: Writer, node: str) -> Stream:
        """A new stream, on which nothing has arrived yet."""
        members = {member.address: member for member in writer.configuration.everyone}
        return writer.connect(members[node])

    def deliver(self, stream: Stream) -> None:
        """The next message arrives; nothing is on disk by that."""
        assert stream.there, "nothing is on its way there"
        node = self.nodes[stream.member.address]
        assert node.is_up, f"{node.name} does not run"
        if stream.number is None:
            stream.number = node.open_stream()
            self._arrived[node.name, stream.number] = stream
        node.receive(stream.number, stream.there.popleft())

    def answer(self, stream: Stream) -> ToProposer:
        """Return the reply to the next message, as soon as the disk allows it."""
        node = self.nodes[stream.member.address]
        while not stream.back:
            assert node.work(), "there is no answer"
        message = stream.back.popleft()
        stream.writer.receive(stream, message)
        return message

    def ask(self, stream: Stream) -> ToProposer:
        self.deliver(stream)
        return self.answer(stream)

    def settle(self, stream: Stream) -> None:
        """All that is on its way arrives, in both directions."""
        node = self.nodes[stream.member.address]
        while stream.there or stream.back:
            if stream.there:
                self.deliver(stream)
            node.sync()
            while stream.back:
                self.answer(stream)

    def hang_up(self, node: str) -> None:
        """All streams to a node end, since its process does."""
        for writer in self.writers.values():
            for stream in writer.streams:
                if stream.member.address == node:
                    stream.is_open = False
                    stream.there.clear()
                    stream.back.clear()

    def fetch(self, member: Member) -> Sequence[Record] | None:
        node = self.nodes[member.address]
        return node.readable() if node.is_up and node.member_id == member.id else None
