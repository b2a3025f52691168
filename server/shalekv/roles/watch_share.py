"""What all watches of a process share: where commits come from, bounds, consumers, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shalekv.clock import Clock
from shalekv.errors import InvalidRequest, ObjectNotFound, Overloaded
from shalekv.read.memory_budget import ResultRoom
from shalekv.roles.watch_consumer import WatchConsumer
from shalekv.settings import WatchSettings
from shalekv.watch.catch_up import CatchUp
from shalekv.watch.consumers import ConsumerLeases
from shalekv.watch.feed import CommitFeed
from shalekv.watch.history import History

if TYPE_CHECKING:
    from shalekv.watch.stream import WatchStream
    from shalekv.watch.watch import Watch

RETRY_AFTER_MS = 1_000


class WatchShare:
    """The watches of one process."""

    def __init__(
        self,
        feed: CommitFeed,
        history: History,
        catch_up: CatchUp,
        leases: ConsumerLeases | None,
        settings: WatchSettings,
        clock: Clock,
    ) -> None:
        """Without `leases` no watch can have a consumer."""
        self.feed = feed
        self.history = history
        self.catch_up = catch_up
        self.settings = settings
        self.clock = clock
        self.room = ResultRoom(settings.watch_bytes_max)
        self.streams: dict[WatchStream, None] = {}
        self.watch_count = 0
        self.commits_told = 0
        self.cut_count = 0
        self._leases = leases
        self._consumers: set[str] = set()

    def check_count(self) -> None:
        """Raise `Overloaded` if no more watches may be opened."""
        if self.watch_count >= self.settings.watch_count_max:
            message = (
                f"{self.watch_count} watches are open, as many as watch_count_max allows. Close "
                "some, or ask another server"
            )
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)

    def claim(self, name: str) -> WatchConsumer:
        """The consumer of this name. Raises `InvalidRequest` when a watch has it."""
        if self._leases is None:
            raise InvalidRequest("create.consumer", "this server keeps no leases for consumers")
        if name in self._consumers:
            problem = f"another watch of this server is open for the consumer {name!r}"
            raise InvalidRequest("create.consumer", problem)
        consumer = WatchConsumer(self._leases, name, self.settings.consumer_lease_ttl_s, self.clock)
        self._consumers.add(name)
        return consumer

    def release(self, consumer: WatchConsumer) -> None:
        """Another watch may have its name."""
        self._consumers.discard(consumer.name)

    async def begin_consumer(self, watch: Watch) -> int:
        """Where a watch with a consumer begins, when its lease keeps what is from there on.

        Raises `WalCollected`, `WalUnprotected`, and what leases and history raise.
        """
        try:
            return await self._begin_consumer(watch)
        except ObjectNotFound as missing:
            raise await self.history.why_missing(missing, watch.next_seq) from None

    async def _begin_consumer(self, watch: Watch) -> int:
        consumer, leases = watch.consumer, self._leases
        assert consumer is not None
        assert leases is not None
        found = await leases.find(consumer.name)
        position = self.feed.position
        end_wal_id = 0 if position.wal_id is None else position.wal_id + 1
        start_seq, wal_id = watch.next_seq, position.next_wal_id
        if start_seq:
            if position.wal_id is not None and start_seq <= position.seq:
                wal_id = await self.history.locate(start_seq, position.wal_id)
        elif found is not None and found.wal_id_min is not None:
            wal_id = min(found.wal_id_min, position.next_wal_id)
            first_seq = await self.history.first_seq(range(wal_id, end_wal_id))
            start_seq = first_seq or position.seq + 1
        await consumer.hold(wal_id)
        return start_seq
