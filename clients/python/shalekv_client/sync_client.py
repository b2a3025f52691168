"""The client for programs without an event loop: the same methods, which wait for the result."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from shalekv_client.channel import MESSAGE_BYTES_MAX, checked_addresses
from shalekv_client.client import TIMEOUT_MS, Client
from shalekv_client.closing import Closing
from shalekv_client.levels import ReadLevel
from shalekv_client.loop_thread import LoopThread
from shalekv_client.operations import At
from shalekv_client.outbox import UNANSWERED_BYTES_MAX
from shalekv_client.policies import Consistency, ReadPolicy
from shalekv_client.retry import RetryPolicy
from shalekv_client.session import Session
from shalekv_client.sync_scan import SyncScan
from shalekv_client.sync_session import SyncSession
from shalekv_client.sync_watch import SyncWatch
from shalekv_client.tokens import SessionToken
from shalekv_client.watch import Watch

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


def _blocking(
    method: Callable[Concatenate[Client, ArgumentsP], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[SyncClient, ArgumentsP], ResultT]:
    """The method that waits for what `method` of the asynchronous client returns."""

    def wait(client: SyncClient, /, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> ResultT:
        # The two attributes are the wrapper's own: this function becomes a method.
        return client._thread.run(method(client._client, *args, **kwargs))  # noqa: SLF001

    wait.__name__, wait.__doc__ = method.__name__, method.__doc__
    return wait


class SyncClient(Closing):
    """Talks to a ShaleKV database. Safe to share between threads.

        with SyncClient("127.0.0.1:7654") as client:
            client.put(b"greeting", b"hello")
            found = client.get(b"greeting")

    The methods take what those of `shalekv_client.Client` take, return what they return, and
    raise what they raise. What several threads ask for at once travels together.
    """

    def __init__(  # noqa: PLR0913 (as the asynchronous client)
        self,
        address: str | Iterable[str],
        *,
        timeout_ms: int = TIMEOUT_MS,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        retry: RetryPolicy | None = None,
        coalesce: bool = True,
        reads: ReadPolicy | str = ReadPolicy.ANY,
        consistency: Consistency | str = Consistency.SESSION,
        token: SessionToken | str | None = None,
        max_staleness_ms: int = 0,
        hedge_ms: int | None = None,
        replica_wait_ms: int = 1_000,
    ) -> None:
        """As `shalekv_client.Client`; starts a thread."""
        self.addresses = checked_addresses(address)
        self.address = self.addresses[0]
        self._thread = LoopThread(self.address)

        async def open_client() -> Client:
            return Client(
                self.addresses,
                timeout_ms=timeout_ms,
                message_bytes_max=message_bytes_max,
                retry=retry,
                coalesce=coalesce,
                reads=reads,
                consistency=consistency,
                token=token,
                max_staleness_ms=max_staleness_ms,
                hedge_ms=hedge_ms,
                replica_wait_ms=replica_wait_ms,
            )

        try:
            self._client = self._thread.run(open_client())
        except BaseException:
            self._thread.close(_nothing)
            raise

    get = _blocking(Client.get)
    batch_get = _blocking(Client.batch_get)
    put = _blocking(Client.put)
    delete = _blocking(Client.delete)
    delete_range = _blocking(Client.delete_range)
    add = _blocking(Client.add)
    write = _blocking(Client.write)
    txn = _blocking(Client.txn)
    ingest = _blocking(Client.ingest)
    status = _blocking(Client.status)
    stats = _blocking(Client.stats)
    create_snapshot = _blocking(Client.create_snapshot)
    renew_snapshot = _blocking(Client.renew_snapshot)
    list_snapshots = _blocking(Client.list_snapshots)
    delete_snapshot = _blocking(Client.delete_snapshot)

    @property
    def token(self) -> SessionToken | None:
        """As `Client.token`."""
        return self._client.token

    def advance(self, token: SessionToken | str) -> None:
        """As `Client.advance`."""

        async def advance() -> None:
            self._client.advance(token)

        self._thread.run(advance())

    def scan(  # noqa: PLR0913 (as the method of the asynchronous client)
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = 0,
        limit_bytes: int = 0,
        keys_only: bool = False,
        page_token: bytes = b"",
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        resumable: bool | None = None,
    ) -> SyncScan:
        """As `Client.scan`, with an ordinary iterator.

        for entry in client.scan(prefix=b"user/"):
            print(entry.key, entry.value)
        """
        scan = self._client.scan(
            start=start,
            end=end,
            prefix=prefix,
            reverse=reverse,
            limit=limit,
            limit_bytes=limit_bytes,
            keys_only=keys_only,
            page_token=page_token,
            read_level=read_level,
            max_staleness_ms=max_staleness_ms,
            at=at,
            resumable=resumable,
        )
        return SyncScan(scan, self._thread)

    def watch(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        from_seq: int = 0,
        previous: bool = False,
        consumer: str = "",
    ) -> SyncWatch:
        """As `Client.watch`, with an ordinary iterator.

        with client.watch(prefix=b"user/") as watch:
            for event in watch:
                print(event)
        """

        async def watch() -> Watch:
            return self._client.watch(
                start=start,
                end=end,
                prefix=prefix,
                from_seq=from_seq,
                previous=previous,
                consumer=consumer,
            )

        return SyncWatch(self._thread.run(watch()), self._thread)

    def session(self, *, bytes_max: int = UNANSWERED_BYTES_MAX) -> SyncSession:
        """As `Client.session`, with futures that threads can wait for."""

        async def open_session() -> Session:
            return self._client.session(bytes_max=bytes_max)

        return SyncSession(self._thread.run(open_session()), self._thread, bytes_max=bytes_max)

    def close(self) -> None:
        """Close the connection and end the thread; calls under way fail. Again, it does nothing."""
        self._thread.close(self._client.close)


async def _nothing() -> None:
    """There is nothing to close when a client could not be opened."""
