"""Sends batches with a few in flight, and keeps account of what is stored for certain."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shalekv.cli.load.batches import Rows
from shalekv.cli.load.ledger import Ledger
from shalekv.cli.load.lines import BadInput
from shalekv.cli.loading.account import Account
from shalekv.cli.loading.pace import Pace
from shalekv.cli.loading.state import write_key
from shalekv_client import Client, Durability, InvalidRequest, NotApplied, ShaleKVError

# How many batches may be stored while an earlier one is not; they are kept in mind.
BEYOND_MAX = 1_000

_CHANGE = re.compile(r"changes\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Sending:
    """How batches are to be sent."""

    durability: Durability
    in_flight_max: int
    collects_bad_rows: bool = False  # a row that the server refuses is a bad row, and no failure


class Loader:
    """Sends batches in order, up to a number at once, until one fails."""

    def __init__(
        self,
        client: Client,
        account: Account,
        sending: Sending,
        *,
        ledger: Ledger,
        pace: Pace | None,
        progress: Callable[[Account], None],
    ) -> None:
        """`progress` is called after every acknowledgement."""
        self._client = client
        self._account = account
        self._sending = sending
        self._ledger = ledger
        self._pace = pace
        self._progress = progress
        self._in_flight: dict[asyncio.Task[None], frozenset[bytes]] = {}

    async def load(self, batches: Iterator[Rows]) -> None:
        """Send all batches; after a failure no more, but those under way come to their end."""
        async with asyncio.TaskGroup() as tasks:
            while rows := await self._next(batches):
                keys = rows.keys()
                await self._keep_pace(len(rows.puts))
                await self._make_room(keys)
                if not self._account.is_good:
                    break
                task = tasks.create_task(self._send(rows))
                self._in_flight[task] = keys
                task.add_done_callback(self._in_flight.pop)

    async def _next(self, batches: Iterator[Rows]) -> Rows | None:
        try:
            # In a thread: standard input may keep us waiting, and replies must not wait with us.
            return await asyncio.to_thread(next, batches, None)
        except BadInput as bad:
            self._account.bad_input = bad
            return None

    async def _keep_pace(self, rows: int) -> None:
        if self._pace is not None:
            wait_s = self._pace.wait_s(asyncio.get_running_loop().time(), rows)
            await asyncio.sleep(wait_s)

    async def _make_room(self, keys: frozenset[bytes]) -> None:
        """Wait until another batch may be sent.

        A batch that sets a key of one in flight waits for that one, so that the last row of a key
        wins whatever happens on the way.
        """
        while self._in_flight and self._is_full():
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
        rivals = [task for task, theirs in self._in_flight.items() if not keys.isdisjoint(theirs)]
        if rivals:
            await asyncio.wait(rivals)

    def _is_full(self) -> bool:
        if self._account.batches_beyond >= BEYOND_MAX and self._account.is_good:
            return True  # an early batch is late
        return len(self._in_flight) >= self._sending.in_flight_max

    async def _send(self, rows: Rows) -> None:
        try:
            written = await self._written(rows)
        except NotApplied as error:
            self._account.refused.append((rows, error))
        except ShaleKVError as error:
            self._account.unknown.append((rows, error))
        except asyncio.CancelledError:
            self._account.cancelled_rows += len(rows.puts)
            raise
        else:
            self._account.acknowledge(written)
            self._progress(self._account)
            await self._ledger.note()

    async def _written(self, rows: Rows) -> Rows:
        """Write the rows, without those that the server refuses if they are to be collected."""
        state, durability = self._ledger.state, self._sending.durability
        while rows.puts:
            key = write_key(state, rows, durability) if state else None
            try:
                await self._client.write(rows.puts, durability=durability, idempotency_key=key)
                break
            except InvalidRequest as error:
                index = refused_row(error, rows)
                if index is None or not self._sending.collects_bad_rows:
                    raise
                rows = rows.without(index, error.details.message)
        return rows


def refused_row(error: ShaleKVError, rows: Rows) -> int | None:
    """Which row of a batch the server complains about, where it says so."""
    found = _CHANGE.match(error.field) if isinstance(error, InvalidRequest) else None
    index = int(found.group(1)) if found else len(rows.puts)
    return index if index < len(rows.puts) else None
