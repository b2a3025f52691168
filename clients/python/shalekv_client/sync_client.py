"""The client for programs without an event loop: the same methods, which wait for the result."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from shalekv_client.channel import MESSAGE_BYTES_MAX
from shalekv_client.client import TIMEOUT_MS, Client
from shalekv_client.closing import Closing
from shalekv_client.levels import ReadLevel
from shalekv_client.loop_thread import LoopThread
from shalekv_client.outbox import UNANSWERED_BYTES_MAX
from shalekv_client.retry import RetryPolicy
from shalekv_client.session import Session
from shalekv_client.sync_scan import SyncScan
from shalekv_client.sync_session import SyncSession

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
    """Talks to the ShaleKV server at one address. Safe to share between threads.

        with SyncClient("127.0.0.1:7654") as client:
            client.put(b"greeting", b"hello")
            found = client.get(b"greeting")

    The methods take what those of `shalekv_client.Client` take, return what they return, and
    raise what they raise. What several threads ask for at once travels together.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_ms: int = TIMEOUT_MS,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        retry: RetryPolicy | None = None,
        coalesce: bool = True,
    ) -> None:
        """As `shalekv_client.Client`; starts a thread."""
        self.address = address
        self._thread = LoopThread(address)

        async def open_client() -> Client:
            return Client(
                address,
                timeout_ms=timeout_ms,
                message_bytes_max=message_bytes_max,
                retry=retry,
                coalesce=coalesce,
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
    status = _blocking(Client.status)
    stats = _blocking(Client.stats)

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
        )
        return SyncScan(scan, self._thread)

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
