"""Reads the rules of a bucket: versioning, lifecycle, and object lock. Nothing is changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.bucket_rules import BucketRules, LifecycleRule, NoncurrentVersions, NotTold
from shalekv.store.s3.answers import Failed, S3Place
from shalekv.store.s3.client import ClientOptions
from shalekv.store.s3.requests import Calls
from shalekv.store.url import BucketUrl

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

T = TypeVar("T")

VERSIONS_MAX = 1_000  # one page of them is enough to tell that they cost
_ENABLED = "Enabled"
_NOT_IMPLEMENTED = 501
# Codes by which a store says that there are none of the rules.
_NONE = frozenset({"NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError"})


async def read_rules(place: BucketUrl, runtime: Runtime, settings: StoreSettings) -> BucketRules:
    """Read the rules of a bucket. What the store refuses is `NotTold`."""
    options = ClientOptions.of(settings)
    shown = S3Place(place.bucket, options.endpoint_url or "Amazon S3", options.region)
    calls = Calls(shown, options, runtime, RequestCounts(), is_direct=False)
    try:
        versioning = await _told(calls, "versioning", _versioning(place.bucket))
        noncurrent: NoncurrentVersions | NotTold | None = None
        if isinstance(versioning, str) and versioning:
            noncurrent = await _told(calls, "versions", _noncurrent(place))
        lifecycle = await _told(calls, "lifecycle", _lifecycle(place.bucket))
        return BucketRules(
            versioning, noncurrent, lifecycle, await _told(calls, "lock", _lock(place.bucket))
        )
    finally:
        await calls.close()


async def _told(
    calls: Calls, operation: str, call: Callable[[S3Client], Awaitable[T]]
) -> T | NotTold:
    async def offered(client: S3Client) -> T | NotTold:
        try:
            return await call(client)
        except ClientError as error:
            if error.response["ResponseMetadata"].get("HTTPStatusCode") == _NOT_IMPLEMENTED:
                return NotTold("this kind of store does not have it")
            raise

    try:
        return await calls.attempt(RequestKind.READ, operation, offered)
    except Failed as failed:
        return NotTold(failed.failure.problem)


def _versioning(bucket: str) -> Callable[[S3Client], Awaitable[str]]:
    async def call(client: S3Client) -> str:
        reply = await client.get_bucket_versioning(Bucket=bucket)
        return str(reply.get("Status", ""))

    return call


def _noncurrent(place: BucketUrl) -> Callable[[S3Client], Awaitable[NoncurrentVersions]]:
    async def call(client: S3Client) -> NoncurrentVersions:
        options: dict[str, Any] = {
            "Bucket": place.bucket,
            "Prefix": f"{place.folder}/" if place.folder else "",
            "MaxKeys": VERSIONS_MAX,
        }
        reply = await client.list_object_versions(**options)
        old = [each["Size"] for each in reply.get("Versions", []) if not each["IsLatest"]]
        return NoncurrentVersions(len(old), sum(old), is_all=not reply.get("IsTruncated", False))

    return call


def _lifecycle(bucket: str) -> Callable[[S3Client], Awaitable[Sequence[LifecycleRule]]]:
    async def call(client: S3Client) -> Sequence[LifecycleRule]:
        try:
            reply = await client.get_bucket_lifecycle_configuration(Bucket=bucket)
        except ClientError as error:
            if error.response["Error"].get("Code") in _NONE:
                return ()
            raise
        return [_rule(each) for each in reply.get("Rules", []) if each.get("Status") == _ENABLED]

    return call


def _rule(reply: Mapping[str, Any]) -> LifecycleRule:
    named: Mapping[str, Any] = reply.get("Filter") or {}
    named = named.get("And") or named
    noncurrent = reply.get("NoncurrentVersionExpiration") or {}
    abort = reply.get("AbortIncompleteMultipartUpload") or {}
    return LifecycleRule(
        id=str(reply.get("ID", "")),
        prefix=str(reply.get("Prefix") or named.get("Prefix") or ""),
        is_narrowed=any(name != "Prefix" for name in named),
        expires=_expiry(reply.get("Expiration") or {}),
        noncurrent_days=noncurrent.get("NoncurrentDays"),
        abort_days=abort.get("DaysAfterInitiation"),
        storage_classes=tuple(
            str(each.get("StorageClass")) for each in reply.get("Transitions") or ()
        ),
    )


def _expiry(reply: Mapping[str, Any]) -> str:
    if reply.get("Days"):
        return f"after {reply['Days']} days"
    return f"on {reply['Date']:%Y-%m-%d}" if reply.get("Date") else ""


def _lock(bucket: str) -> Callable[[S3Client], Awaitable[str]]:
    async def call(client: S3Client) -> str:
        try:
            reply: Mapping[str, Any] = await client.get_object_lock_configuration(Bucket=bucket)
        except ClientError as error:
            if error.response["Error"].get("Code") in _NONE:
                return ""
            raise
        found = reply.get("ObjectLockConfiguration") or {}
        if found.get("ObjectLockEnabled") != _ENABLED:
            return ""
        rule = (found.get("Rule") or {}).get("DefaultRetention") or {}
        for unit in ("Days", "Years"):
            if rule.get(unit):
                return f"{rule.get('Mode', '')} for {rule[unit]} {unit.lower()}"
        return "no default"

    return call
