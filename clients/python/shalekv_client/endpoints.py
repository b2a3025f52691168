"""Which servers there are, what is known of each, and which one is asked next.

No I/O and no clock: whoever asks gives the time, and chance. `shalekv_client.servers` holds the
connections, `shalekv_client.fleet` sends calls by what is decided here.

* The addresses that the user gave are there for ever. Those that servers tell of, as that of the
  writer, are added, and dropped when they turn out not to be the writer's any more.
* The writer is the server that says so under the greatest epoch that anybody has told of.
* A server that fails is passed over as long as others are there. After a while, longer each time,
  it is asked for its status, and read again when it answers: so no read waits for it in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from shalekv_client.policies import Destination, Role

AVOID_INITIAL_S = 0.25
AVOID_MAX_S = 5.0
LATENCY_WEIGHT = 0.2  # of a new measurement
EXPLORED_SHARE = 0.05  # of the reads to the nearest server go to another, which may be nearer now


@dataclass(slots=True, eq=False)
class Endpoint:
    """What is known of the server at an address."""

    address: str
    is_listed: bool  # by the user
    role: Role | None = None  # None: not known
    epoch: int = 0  # that it last spoke of
    latency_ms: float | None = None  # of its answers to reads
    seq: int = 0  # of its last status
    failures: int = 0  # since its last answer: until then others are preferred
    avoid_until_s: float = 0.0  # then it is asked for its status
    wanted_seq: int = 0  # what its status must show before it is read again


class Endpoints:
    """The servers of one database, as one client knows them."""

    def __init__(self, addresses: Iterable[str], *, nearest_first: bool = False) -> None:
        """`addresses` are those that the user gave, at least one. Reads by policy go to the nearest
        of them, or to all in turn.
        """
        self._known = {address: Endpoint(address, is_listed=True) for address in addresses}
        self._nearest_first = nearest_first
        self._turn = 0
        self.writer: Endpoint | None = None  # None: not known
        self.failing: set[Endpoint] = set()
        # The only one, as long as it is not known to be a reader: then there is no choice.
        self.sole: Endpoint | None = None
        self._settle()
        self.epoch = 0  # the greatest that any server has told of

    def __len__(self) -> int:
        """How many there are."""
        return len(self._known)

    def __iter__(self) -> Iterator[Endpoint]:
        """All of them: first those of the user."""
        return iter(tuple(self._known.values()))

    def get(self, address: str) -> Endpoint | None:
        """The one at this address, if it is known."""
        return self._known.get(address)

    def _settle(self) -> None:
        first = next(iter(self._known.values()))
        is_alone = len(self._known) == 1 and first.role is not Role.READER
        self.sole = first if is_alone else None

    def choose(
        self,
        destination: Destination,
        chance: float,
        tried: Collection[Endpoint] = (),
    ) -> Endpoint | None:
        """Whom to ask next, beside those that were `tried`; None: nobody, or the writer is unknown.

        `chance` is a random number of 0 to 1.
        """
        if destination is Destination.WRITER:
            found = self.sole or self.writer
            return None if found is None or found in tried else found
        left = [each for each in self.serving() if each not in tried]
        serving = [each for each in left if not each.failures]
        if not serving:  # better one that has failed than none
            return min(left, key=_avoided_until, default=None)
        if self._nearest_first:
            return nearest(serving, chance)
        readers = [each for each in serving if each is not self.writer]
        self._turn += 1
        return readers[self._turn % len(readers)] if readers else serving[0]

    def has_others(self, tried: Collection[Endpoint]) -> bool:
        """Whether there is somebody beside those."""
        return any(each not in tried for each in self.serving())

    def serving(self) -> list[Endpoint]:
        """Those that reads may go to: an address that was only told of is nobody's, until it has
        answered as the writer.
        """
        writer = self.writer
        return [each for each in self._known.values() if each.is_listed or each is writer]

    def heard(self, endpoint: Endpoint, role: Role | None, epoch: int) -> None:
        """It has answered in this role, and the newest writer that it knows has this epoch."""
        endpoint.role, endpoint.epoch = role, epoch
        self.epoch = max(self.epoch, epoch)
        writer = self.writer
        if role is Role.WRITER and epoch >= self.epoch:
            is_known = writer is not None and writer.is_listed and writer.epoch == epoch
            if not is_known or endpoint.is_listed:  # it may be known by two addresses
                self.writer = endpoint
        elif writer is not None and (writer is endpoint or writer.epoch < epoch):
            self.writer = None  # there is a newer one, or this one became something else
        self._settle()

    def overtaken(self, epoch: int) -> None:
        """A writer of this epoch was told of: one of a smaller epoch is none any more."""
        self.epoch = max(self.epoch, epoch)
        if self.writer is not None and self.writer.epoch < self.epoch:
            self.writer = None

    def answered(self, endpoint: Endpoint, latency_ms: float) -> None:
        """It has answered a read, after so long."""
        if endpoint.failures:
            self.serves(endpoint)
        self._measured(endpoint, latency_ms)

    def serves(self, endpoint: Endpoint) -> None:
        """It can be read."""
        endpoint.failures, endpoint.avoid_until_s, endpoint.wanted_seq = 0, 0.0, 0
        self.failing.discard(endpoint)

    @staticmethod
    def _measured(endpoint: Endpoint, latency_ms: float) -> None:
        known_ms = endpoint.latency_ms
        if known_ms is None:
            endpoint.latency_ms = latency_ms
        else:
            endpoint.latency_ms = known_ms + LATENCY_WEIGHT * (latency_ms - known_ms)

    def outrun(self, endpoint: Endpoint, latency_ms: float) -> None:
        """It had not answered a read after so long, and another one had."""
        if endpoint.latency_ms is None or latency_ms > endpoint.latency_ms:
            self._measured(endpoint, latency_ms)

    def failed(self, endpoint: Endpoint, now_s: float, wanted_seq: int = 0) -> None:
        """It does not serve, or is too far behind: at least behind `wanted_seq`. Ask others."""
        endpoint.failures += 1
        endpoint.wanted_seq = max(endpoint.wanted_seq, wanted_seq)
        self.failing.add(endpoint)
        longest_s = AVOID_INITIAL_S * 2.0 ** min(endpoint.failures - 1, 16)
        endpoint.avoid_until_s = now_s + min(AVOID_MAX_S, longest_s)

    def is_reader(self, endpoint: Endpoint) -> None:
        """It has refused to write."""
        self.heard(endpoint, Role.READER, endpoint.epoch)

    def doubt(self, endpoint: Endpoint) -> None:
        """It may not be the writer, whatever it has said: find out before the next write."""
        if endpoint.role is Role.WRITER:
            endpoint.role, endpoint.epoch = None, 0
        if self.writer is endpoint:
            self.writer = None

    def told(self, address: str) -> Endpoint:
        """The one at an address where somebody says the writer is."""
        found = self._known.get(address)
        if found is None:
            found = self._known[address] = Endpoint(address, is_listed=False)
            self._settle()
        return found

    def forget_told(self) -> list[Endpoint]:
        """Forget, and return, those that the user has not given, but for the writer."""
        dropped = [each for each in self._known.values() if not each.is_listed]
        dropped = [each for each in dropped if each is not self.writer]
        for each in dropped:
            del self._known[each.address]
            self.failing.discard(each)
        self._settle()
        return dropped


def nearest(serving: Collection[Endpoint], chance: float) -> Endpoint:
    """The one that answers soonest; now and then another, to learn how near it is now."""
    unknown = [each for each in serving if each.latency_ms is None]
    if unknown:
        return unknown[int(chance * len(unknown)) % len(unknown)]
    by_latency = sorted(serving, key=_latency_ms)
    if chance >= EXPLORED_SHARE or len(by_latency) == 1:
        return by_latency[0]
    others = by_latency[1:]
    return others[int(chance / EXPLORED_SHARE * len(others)) % len(others)]


def _latency_ms(endpoint: Endpoint) -> float:
    return endpoint.latency_ms or 0.0


def _avoided_until(endpoint: Endpoint) -> float:
    return endpoint.avoid_until_s
