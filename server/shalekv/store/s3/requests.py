"""The requests about one object, each as a call of botocore's client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from shalekv.errors import InvalidRequest
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectInfo, RequestCounts, RequestKind, check_name
from shalekv.store.s3.answers import (
    FAILURES,
    Failed,
    FailedRequest,
    RequestOutcome,
    S3Place,
    judge,
    judge_part,
)
from shalekv.store.s3.client import ClientOptions, SharedClient, counted_as, give_back, lease

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import (
        DeleteObjectsOutputTypeDef,
        ListObjectsV2OutputTypeDef,
        ObjectTypeDef,
    )


# --- calls
# Calls of one store over the client that it shares: sent once, counted, and judged.


T = TypeVar("T")

Call = Callable[["S3Client"], Awaitable[T]]


class Calls:
    """Sends the calls of the store of `place` and counts them in `sent`."""

    def __init__(
        self, place: S3Place, options: ClientOptions, runtime: Runtime, sent: RequestCounts
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

    def judge_part(self, details: Mapping[str, Any], operation: str) -> FailedRequest:
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
            raise Failed(FailedRequest(RequestOutcome.REFUSED, problem)) from None
        now_ms = self._leased().clock.heard(told_ms, self._runtime.clock.monotonic_ms())
        if now_ms is None:
            problem = f"a reply of {self._place.endpoint} is far ahead of its clock: ask again"
            raise Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))
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


# --- requests


CONTENT_TYPE = "application/octet-stream"
NOT_THERE = frozenset({"NoSuchKey", "InvalidRange"})


@dataclass(frozen=True, slots=True)
class FoundObject:
    """What a store answered about an object, or a part of it if `is_part`."""

    data: bytes
    size_bytes: int  # of what was asked for: after a HEAD, of the object
    modified_ms: int
    metadata: Mapping[str, str]
    is_part: bool


def put(
    target: Mapping[str, str],
    data: bytes,
    metadata: Mapping[str, str],
    condition: Mapping[str, str],
) -> Call[None]:
    """Make `data` the object `target`, which is bucket and key."""

    async def call(client: S3Client) -> None:
        # Of bytes, botocore makes a file, and for files it waits for the server's "100 Continue":
        # another round trip in every commit. Memory it leaves as it is.
        options: dict[str, Any] = {**target, **condition, "Body": memoryview(data)}
        check_stored(
            await client.put_object(**options, Metadata=dict(metadata), ContentType=CONTENT_TYPE)
        )

    return call


def copy(bucket: str, source: str, destination: str) -> Call[None]:
    """Copy an object inside the store, with its metadata."""

    async def call(client: S3Client) -> None:
        # An error that comes when the status 200 was sent already is one to botocore as well.
        reply = await client.copy_object(
            Bucket=bucket,
            Key=destination,
            CopySource={"Bucket": bucket, "Key": source},
            MetadataDirective="COPY",
        )
        check_stored(reply.get("CopyObjectResult", {}))

    return call


def get(bucket: str, key: str, wanted: str = "") -> Call[FoundObject]:
    """Read an object, or the range of it that `wanted` is in the words of HTTP."""

    async def call(client: S3Client) -> FoundObject:
        options: dict[str, Any] = {"Range": wanted} if wanted else {}
        reply = await client.get_object(Bucket=bucket, Key=key, **options)
        async with reply["Body"] as body:
            data = await body.read()
        return FoundObject(
            data,
            len(data),
            _modified_ms(reply),
            MappingProxyType(dict(reply.get("Metadata", {}))),
            is_part="ContentRange" in reply,
        )

    return call


def head(bucket: str, key: str) -> Call[FoundObject]:
    """Ask for what `get` tells, without the bytes."""

    async def call(client: S3Client) -> FoundObject:
        reply = await client.head_object(Bucket=bucket, Key=key)
        return FoundObject(
            b"",
            reply["ContentLength"],
            _modified_ms(reply),
            MappingProxyType(dict(reply.get("Metadata", {}))),
            is_part=False,
        )

    return call


def time_of_day(bucket: str, key: str) -> Call[Mapping[str, Any]]:
    """A reply that has the time in its header, to a question about an object that is not there.

    It is a GET, since a reply to HEAD does not say that there is no bucket.
    """

    async def call(client: S3Client) -> Mapping[str, Any]:
        try:
            reply = await client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0")
        except ClientError as error:
            if error.response["Error"].get("Code") not in NOT_THERE:
                raise
            return error.response
        async with reply["Body"] as body:  # somebody has made it
            await body.read()
        return reply

    return call


def check_stored(reply: Mapping[str, Any]) -> None:
    """Raise `Failed` unless the reply to an upload or a copy is that of a store: it has an ETag.

    A success that a proxy tells in its place, or a reply that was cut to nothing, is no answer.
    """
    if not reply.get("ETag"):
        problem = "a success without an ETag: another server than the store's answered"
        raise Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))


def _modified_ms(reply: Mapping[str, Any]) -> int:
    moment: datetime | None = reply.get("LastModified")
    if moment is None:
        problem = "an object without Last-Modified: another server than the store's answered"
        raise Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))
    return int(moment.timestamp()) * 1000


# --- listing
# Lists of an S3 bucket, page by page.


PAGE_NAMES = 1_000  # the most that S3 answers at once


async def list_objects(
    calls: Calls, bucket: str, root: str, prefix: str, start_after: str
) -> AsyncIterator[ObjectInfo]:
    """The objects below `prefix` behind `start_after`, both relative to `root`, as are the names.

    `root` is "" or ends in a slash. Raises `Failed`.
    """
    start: dict[str, Any] = {"StartAfter": root + start_after} if start_after else {}
    while True:
        options = {"Bucket": bucket, "Prefix": root + prefix, "MaxKeys": PAGE_NAMES, **start}
        page = await calls.attempt(RequestKind.LIST, "list", partial(_page, options=options))
        contents = page.get("Contents", [])
        for info in _infos(contents, root):
            yield info
        if not page["IsTruncated"]:
            return
        token = page.get("NextContinuationToken")
        if not token and not contents:
            raise _no_page("said that more follows, and not where")
        start = {"ContinuationToken": token} if token else {"StartAfter": contents[-1]["Key"]}


async def _page(client: S3Client, options: dict[str, Any]) -> ListObjectsV2OutputTypeDef:
    page = await client.list_objects_v2(**options)
    # Whatever a proxy answers in the place of a list would be a list of nothing.
    if "IsTruncated" not in page:
        raise _no_page("did not say whether it is whole: another server than the store's answered")
    return page


def _no_page(problem: str) -> Failed:
    return Failed(FailedRequest(RequestOutcome.UNCERTAIN, f"a list {problem}"))


def _infos(contents: list[ObjectTypeDef], root: str) -> Iterator[ObjectInfo]:
    for entry in contents:
        name = entry["Key"].removeprefix(root)
        try:
            check_name(name)
        except InvalidRequest:
            continue  # a folder that a web console made, such as wal/: no object of a database
        # Some servers list milliseconds and leave them out elsewhere; all agree on seconds.
        modified_ms = int(entry["LastModified"].timestamp()) * 1000
        yield ObjectInfo(name, entry["Size"], modified_ms)


# --- deleting
# Deleting many objects of an S3 bucket by one request.


@dataclass(frozen=True, slots=True)
class NotDeleted:
    """An object that is still there, and why."""

    key: str
    failure: FailedRequest


async def delete_batch(calls: Calls, bucket: str, keys: Sequence[str]) -> NotDeleted | None:
    """Delete at most 1,000 objects. None if all are gone, else one that is not.

    A refusal of any stands for all: it has to be mended, while the others may pass.
    """

    async def call(client: S3Client) -> DeleteObjectsOutputTypeDef:
        objects: Any = [{"Key": key} for key in keys]
        return await client.delete_objects(
            Bucket=bucket, Delete={"Objects": objects, "Quiet": True}
        )

    reply = await calls.attempt(RequestKind.DELETE, "delete", call)
    failures = [
        NotDeleted(error.get("Key", keys[0]), calls.judge_part(error, "delete"))
        for error in reply.get("Errors", [])
    ]
    failures = [at for at in failures if at.failure.verdict is not RequestOutcome.ABSENT]
    failures.sort(key=lambda at: at.failure.verdict is not RequestOutcome.REFUSED)
    return failures[0] if failures else None
