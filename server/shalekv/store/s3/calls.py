"""Calls of one store over the client that it shares: sent once, counted, and judged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from shalekv.runtime import Runtime
from shalekv.store.requests import RequestCounts, RequestKind
from shalekv.store.s3.advice import Place
from shalekv.store.s3.answers import FAILURES, Failed, Failure, Verdict, judge, judge_part
from shalekv.store.s3.client import ClientOptions, SharedClient, give_back, lease
from shalekv.store.s3.wire import counted_as

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

T = TypeVar("T")

Call = Callable[["S3Client"], Awaitable[T]]


class Calls:
    """Sends the calls of the store of `place` and counts them in `sent`."""

    def __init__(
        self, place: Place, options: ClientOptions, runtime: Runtime, sent: RequestCounts
    ) -> None:
        """Nothing is opened before the first call."""
        self._place = place
        self._options = options
        self._runtime = runtime
        self._sent = sent
        self._lease: SharedClient | None = None
        self._is_closed = False

    async def attempt(self, kind: RequestKind, operation: str, call: Call[T]) -> T:
        """The result of ``call(client)``, which sends one request; raises `Failed`."""
        try:
            client = await self._leased().opened(self._runtime.workers)
            with counted_as(self._sent, kind):
                return await call(client)
        except FAILURES as error:
            # The cause is not chained: its text is the server's, or a whole URL.
            raise Failed(judge(error, self._place, operation)) from None

    def judge_part(self, details: Mapping[str, Any], operation: str) -> Failure:
        """What an error about one object of many says."""
        return judge_part(details, self._place, operation)

    def clock_ms(self, reply: Mapping[str, Any]) -> int:
        """The store's time by the header of a reply, in whole seconds; it never goes back.

        Raises `Failed` when there is no such header, or when it tells too much more than others.
        """
        date = reply["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            told_ms = int(parsedate_to_datetime(date).timestamp()) * 1000
        except ValueError:
            problem = f"{self._place.endpoint} puts no Date into its replies, as HTTP demands"
            raise Failed(Failure(Verdict.REFUSED, problem)) from None
        now_ms = self._leased().clock.heard(told_ms, self._runtime.clock.monotonic_ms())
        if now_ms is None:
            problem = f"a reply of {self._place.endpoint} is far ahead of its clock: ask again"
            raise Failed(Failure(Verdict.UNCERTAIN, problem))
        return now_ms

    async def close(self) -> None:
        """Give the client back."""
        self._is_closed = True
        leased, self._lease = self._lease, None
        if leased is not None:
            await give_back(leased)

    def _leased(self) -> SharedClient:
        if self._lease is None:
            if self._is_closed:
                raise RuntimeError(f"the store of {self._place} is used after it was closed")
            self._lease = lease(self._options)
        return self._lease
