"""Lists of an S3 bucket, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from shalekv.errors import InvalidRequest
from shalekv.store.api import ObjectInfo
from shalekv.store.arguments import check_name
from shalekv.store.requests import RequestKind
from shalekv.store.s3.answers import Failed, Failure, Verdict
from shalekv.store.s3.calls import Calls

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import ListObjectsV2OutputTypeDef, ObjectTypeDef

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
    return Failed(Failure(Verdict.UNCERTAIN, f"a list {problem}"))


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
