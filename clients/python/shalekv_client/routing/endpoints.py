"""The list of the servers of a database: what is known of each, and which one is asked next.

Does no I/O and reads no clock: the caller gives the time and the random number.
`shalekv_client.routing.servers` holds the connections, `shalekv_client.routing.fleet` sends calls.

* The addresses that the user gave stay for ever. The addresses of writers that servers report are
  added, and dropped when the writer turns out not to be there.
* The writer is the server that answers as the writer under the greatest epoch known.
* A server that fails is avoided as long as there are others. After a while, longer each time, it
  is asked for its status, and read again when it answers. So no read waits for it in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from shalekv_client.policies import Destination, Role

AVOID_INITIAL_S = 0.25
AVOID_MAX_S = 5.0
LATENCY_WEIGHT = 0.2  # of a new measurement
EXPLORED_SHARE = 0.05  # of the reads for the nearest server: to another, which may be nearer now


@dataclass(slots=True, eq=False)
class Endpoint:
    """The server at an address, as far as it is known."""

    address: str
    is_listed: bool  # given by the user
    role: Role | None = None  # None: not known
    epoch: int = 0  # that it last reported
    latency_ms: float | None = None  # of its answers to reads; None: not measured
    seq: int = 0  # of its last status
    failures: int = 0  # since its last answer; if there are any, others are preferred
    avoid_until_s: float = 0.0  # when it is asked for its status
    wanted_seq: int = 0  # that its status must have reached before it is read again


class Endpoints:
    """The servers of one database, as one client knows them."""

    def __init__(self, addresses: Iterable[str], *, nearest_first: bool = False) -> None:
        """Create the list of the `addresses` that the user gave, at least one.

        Reads by policy go to the nearest server, or else to all in turn.
        """
        self._known = {address: Endpoint(address, is_listed=True) for address in addresses}
        self._nearest_first = nearest_first
        self._turn = 0
        self.writer: Endpoint | None = None  # None: not known
        self.failing: set[Endpoint] = set()
        # The only server, unless it is known to be a reader. While it is set there is no choice.
        self.sole: Endpoint | None = None
        self._update_sole()
        self.epoch = 0  # the greatest that any server has reported

    def __len__(self) -> int:
        """Return the number of servers."""
        return len(self._known)

    def __iter__(self) -> Iterator[Endpoint]:
        """Iterate over all servers: first those that the user gave."""
        return iter(tuple(self._known.values()))

    def get(self, address: str) -> Endpoint | None:
        """Return the server at this address; None: it is not known."""
        return self._known.get(address)

    def _update_sole(self) -> None:
        first = next(iter(self._known.values()))
        is_alone = len(self._known) == 1 and first.role is not Role.READER
        self.sole = first if is_alone else None

    def choose(
        self,
        destination: Destination,
        chance: float,
        tried: Collection[Endpoint] = (),
    ) -> Endpoint | None:
        """Return the server to ask next, none of those that were `tried`.

        None: there is none, or the writer is not known. `chance` is a random number of 0 to 1.
        """
        if destination is Destination.WRITER:
            found = self.sole or self.writer
            return None if found is None or found in tried else found
        left = [each for each in self.serving() if each not in tried]
        serving = [each for each in left if not each.failures]
        if not serving:  # a server that has failed is better than none
            return min(left, key=_avoided_until, default=None)
        if self._nearest_first:
            return nearest(serving, chance)
        readers = [each for each in serving if each is not self.writer]
        self._turn += 1
        return readers[self._turn % len(readers)] if readers else serving[0]

    def serving(self) -> list[Endpoint]:
        """Return the servers that reads may go to.

        A reported address is not one of them until its server has answered as the writer.
        """
        writer = self.writer
        return [each for each in self._known.values() if each.is_listed or each is writer]

    def note_role(self, endpoint: Endpoint, role: Role | None, epoch: int) -> None:
        """Note the role of a server, and the epoch of the newest writer that it knows."""
        endpoint.role, endpoint.epoch = role, epoch
        self.epoch = max(self.epoch, epoch)
        writer = self.writer
        if role is Role.WRITER and epoch >= self.epoch:
            is_known = writer is not None and writer.is_listed and writer.epoch == epoch
            if not is_known or endpoint.is_listed:  # one server may have two addresses
                self.writer = endpoint
        elif writer is not None and (writer is endpoint or writer.epoch < epoch):
            self.writer = None  # there is a newer writer, or this server is not the writer now
        self._update_sole()

    def note_newer_epoch(self, epoch: int) -> None:
        """Note that a writer with this epoch exists: one with a smaller epoch is not the writer."""
        self.epoch = max(self.epoch, epoch)
        if self.writer is not None and self.writer.epoch < self.epoch:
            self.writer = None

    def answered(self, endpoint: Endpoint, latency_ms: float) -> None:
        """Note that a server has answered a read after `latency_ms`."""
        if endpoint.failures:
            self.serves(endpoint)
        self._measured(endpoint, latency_ms)

    def serves(self, endpoint: Endpoint) -> None:
        """Note that a server can be read again."""
        endpoint.failures, endpoint.avoid_until_s, endpoint.wanted_seq = 0, 0.0, 0
        self.failing.discard(endpoint)

    @staticmethod
    def _measured(endpoint: Endpoint, latency_ms: float) -> None:
        known_ms = endpoint.latency_ms
        if known_ms is None:
            endpoint.latency_ms = latency_ms
        else:
            endpoint.latency_ms = known_ms + LATENCY_WEIGHT * (latency_ms - known_ms)

    def note_slower(self, endpoint: Endpoint, latency_ms: float) -> None:
        """Note that another server has answered a read, and this one had not after `latency_ms`."""
        if endpoint.latency_ms is None or latency_ms > endpoint.latency_ms:
            self._measured(endpoint, latency_ms)

    def failed(self, endpoint: Endpoint, now_s: float, wanted_seq: int = 0) -> None:
        """Note that a server does not serve, or has not reached `wanted_seq`; others are asked."""
        endpoint.failures += 1
        endpoint.wanted_seq = max(endpoint.wanted_seq, wanted_seq)
        self.failing.add(endpoint)
        longest_s = AVOID_INITIAL_S * 2.0 ** min(endpoint.failures - 1, 16)
        endpoint.avoid_until_s = now_s + min(AVOID_MAX_S, longest_s)

    def note_reader(self, endpoint: Endpoint) -> None:
        """Note that a server has refused to write."""
        self.note_role(endpoint, Role.READER, endpoint.epoch)

    def doubt(self, endpoint: Endpoint) -> None:
        """Note that a server may not be the writer any more: the next write searches for it."""
        if endpoint.role is Role.WRITER:
            endpoint.role, endpoint.epoch = None, 0
        if self.writer is endpoint:
            self.writer = None

    def add_reported(self, address: str) -> Endpoint:
        """Return the server at an address reported as the writer's; adds it if it is new."""
        found = self._known.get(address)
        if found is None:
            found = self._known[address] = Endpoint(address, is_listed=False)
            self._update_sole()
        return found

    def drop_reported(self) -> list[Endpoint]:
        """Remove and return the servers that the user has not given, except the writer."""
        dropped = [each for each in self._known.values() if not each.is_listed]
        dropped = [each for each in dropped if each is not self.writer]
        for each in dropped:
            del self._known[each.address]
            self.failing.discard(each)
        self._update_sole()
        return dropped


def nearest(serving: Collection[Endpoint], chance: float) -> Endpoint:
    """Return the server that answers soonest; now and then another, to measure its latency."""
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
