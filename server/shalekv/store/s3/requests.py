"""Requests to S3, each a call of botocore's client that is sent once, counted, and judged.

`Calls` sends them for one store. The functions make requests about one object, lists, and
deletions of many objects.
"""

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
    judge_reply,
)
from shalekv.store.s3.client import (
    ClientOptions,
    OneAttempt,
    SharedClient,
    acquire_client,
    counted_as,
    learning,
    release_client,
)
from shalekv.store.s3.direct import Route, learnt_route

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import (
        DeleteObjectsOutputTypeDef,
        ListObjectsV2OutputTypeDef,
        ObjectTypeDef,
    )


T = TypeVar("T")

Call = Callable[["S3Client"], Awaitable[T]]

CONTENT_TYPE = "application/octet-stream"
NOT_THERE = frozenset({"NoSuchKey", "InvalidRange"})
PAGE_NAMES = 1_000  # the most that S3 answers at once


class Calls:
    """Sends the calls of one store over the shared client, and counts them in `sent`."""

    def __init__(
        self,
        place: S3Place,
        options: ClientOptions,
        runtime: Runtime,
        sent: RequestCounts,
        *,
        is_direct: bool,
    ) -> None:
        """Open nothing yet: the first call acquires the client.

        Without `is_direct`, botocore sends every request.
        """
        self._place = place
        self._options = options
        self._runtime = runtime
        self._sent = sent
        self._acquired: SharedClient | None = None
        self._is_direct = is_direct
        self._route: Route | None = None  # of reads that botocore does not send
        self._is_closed = False

    async def attempt(self, kind: RequestKind, operation: str, call: Call[T]) -> T:
        """Return the result of ``call(client)``, which sends one request. Raises `Failed`."""
        try:
            client = await self._client().opened(self._runtime.workers)
            with counted_as(self._sent, kind):
                return await call(client)
        except FAILURES as error:
            # The cause is not chained: its text is the server's, or has a whole URL.
            raise Failed(judge(error, self._place, operation)) from None

    async def get_part(self, bucket: str, key: str, wanted: str) -> FoundPart:
        """Read the range `wanted`, written as in HTTP, of an object. Raises `Failed`.

        The first request is botocore's, and so are all others if it shows no `Route`.
        """
        if self._route is None:
            with learning(partial(self._learn, key)):
                found = await self.attempt(RequestKind.READ, "get_range", get(bucket, key, wanted))
            return FoundPart(found.data, is_part=found.is_part)
        try:
            credentials = await self._client().frozen_credentials()
            self._sent.add(RequestKind.READ)
            reply = await self._route.get_part(key, wanted, credentials)
        except FAILURES as error:
            raise Failed(judge(error, self._place, "get_range")) from None
        if reply.is_error:
            raise Failed(judge_reply(reply.as_error(), self._place, "get_range"))
        if "Last-Modified" not in reply.headers:
            raise _no_object()
        return FoundPart(reply.data, is_part="Content-Range" in reply.headers)

    def _learn(self, key: str, http: OneAttempt, request: Any) -> None:
        if self._is_direct:
            self._route = learnt_route(http, request, key)

    def judge_part(self, details: Mapping[str, Any], operation: str) -> FailedRequest:
        """Judge the error about one object of a batch."""
        return judge_part(details, self._place, operation)

    def clock_ms(self, reply: Mapping[str, Any]) -> int:
        """Return the store's time by the header of a reply, in whole seconds; it never goes back.

        Raises `Failed` when there is no such header, or when it is far ahead of earlier replies.
        """
        date = reply["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            store_ms = int(parsedate_to_datetime(date).timestamp()) * 1000
        except ValueError:
            problem = f"{self._place.endpoint} puts no Date into its replies, as HTTP demands"
            raise Failed(FailedRequest(RequestOutcome.REFUSED, problem)) from None
        now_ms = self._client().clock.observe(store_ms, self._runtime.clock.monotonic_ms())
        if now_ms is None:
            problem = f"a reply of {self._place.endpoint} is far ahead of its clock: ask again"
            raise Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))
        return now_ms

    async def close(self) -> None:
        """Release the client."""
        self._is_closed = True
        acquired, self._acquired = self._acquired, None
        self._route = None
        if acquired is not None:
            await release_client(acquired)

    def _client(self) -> SharedClient:
        if self._acquired is None:
            if self._is_closed:
                raise RuntimeError(f"the store of {self._place} is used after it was closed")
            self._acquired = acquire_client(self._options)
        return self._acquired


@dataclass(frozen=True, slots=True)
class FoundPart:
    """Bytes of an object: all of it, unless `is_part`."""

    data: bytes
    is_part: bool


@dataclass(frozen=True, slots=True)
class FoundObject:
    """Reply about an object; if `is_part`, about a range of it."""

    data: bytes
    size_bytes: int  # of `data`; after a HEAD, of the object
    modified_ms: int
    metadata: Mapping[str, str]
    is_part: bool


def put(
    target: Mapping[str, str],
    data: bytes,
    metadata: Mapping[str, str],
    condition: Mapping[str, str],
) -> Call[None]:
    """Write `data` as the object `target`: bucket and key."""

    async def call(client: S3Client) -> None:
        # botocore turns bytes into a file, and for files it waits for the server's "100 Continue":
        # another round trip in every commit. It leaves a memoryview as it is.
        options: dict[str, Any] = {**target, **condition, "Body": memoryview(data)}
        check_stored(
            await client.put_object(**options, Metadata=dict(metadata), ContentType=CONTENT_TYPE)
        )

    return call


def copy(bucket: str, source: str, destination: str) -> Call[None]:
    """Copy an object inside the store, with its metadata."""

    async def call(client: S3Client) -> None:
        # botocore also raises an error that the server reports after it has sent the status 200.
        reply = await client.copy_object(
            Bucket=bucket,
            Key=destination,
            CopySource={"Bucket": bucket, "Key": source},
            MetadataDirective="COPY",
        )
        check_stored(reply.get("CopyObjectResult", {}))

    return call


def get(bucket: str, key: str, wanted: str = "") -> Call[FoundObject]:
    """Read an object, or the range `wanted` of it, written as in HTTP."""

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
    """Read what `get` returns, without the bytes."""

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
    """Request an object that does not exist, and return the reply, which has the time in a header.

    It is a GET, since the reply to a HEAD does not say when the bucket is missing.
    """

    async def call(client: S3Client) -> Mapping[str, Any]:
        try:
            reply = await client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0")
        except ClientError as error:
            if error.response["Error"].get("Code") not in NOT_THERE:
                raise
            return error.response
        async with reply["Body"] as body:  # the object exists after all
            await body.read()
        return reply

    return call


def check_stored(reply: Mapping[str, Any]) -> None:
    """Raise `Failed` unless the reply to an upload or a copy has an ETag, as a store's reply has.

    A success that a proxy reports in its place, or a truncated reply, is no answer.
    """
    if not reply.get("ETag"):
        problem = "a success without an ETag: another server than the store's answered"
        raise Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))


def _modified_ms(reply: Mapping[str, Any]) -> int:
    moment: datetime | None = reply.get("LastModified")
    if moment is None:
        raise _no_object()
    return int(moment.timestamp()) * 1000


def _no_object() -> Failed:
    problem = "an object without Last-Modified: another server than the store's answered"
    return Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))


async def list_objects(
    calls: Calls, bucket: str, root: str, prefix: str, start_after: str
) -> AsyncIterator[ObjectInfo]:
    """List the objects below `prefix` that sort after `start_after`, page by page.

    Both are relative to `root`, as are the names. `root` is "" or ends in a slash. Raises `Failed`.
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
    # The reply of a proxy would otherwise be taken for an empty list.
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
        # Some servers report milliseconds only in lists; all report seconds everywhere.
        modified_ms = int(entry["LastModified"].timestamp()) * 1000
        yield ObjectInfo(name, entry["Size"], modified_ms)


@dataclass(frozen=True, slots=True)
class NotDeleted:
    """An object that was not deleted, and why."""

    key: str
    failure: FailedRequest


async def delete_batch(calls: Calls, bucket: str, keys: Sequence[str]) -> NotDeleted | None:
    """Delete at most 1,000 objects; return None if all are gone, else one that is not.

    If any was refused, one of these is returned: a refusal must be fixed, while other failures may
    be transient.
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
    failures = [at for at in failures if at.failure.outcome is not RequestOutcome.ABSENT]
    failures.sort(key=lambda at: at.failure.outcome is not RequestOutcome.REFUSED)
    return failures[0] if failures else None
