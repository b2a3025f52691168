"""Rules of a bucket that change or keep the objects of a database: values, without requests.

`shalekv.store.s3.rules` reads them. Other providers have no such request that ShaleKV can send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotTold:
    """The store did not answer a question about the bucket."""

    reason: str


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """A rule by which the provider deletes or moves objects."""

    id: str
    prefix: str  # of the keys that it is about
    is_narrowed: bool  # to some of them, by tags or sizes
    expires: str = ""  # when objects are deleted, in words; empty: they are not
    noncurrent_days: int | None = None  # until a replaced or deleted version is deleted
    abort_days: int | None = None  # until an upload in parts is aborted
    storage_classes: Sequence[str] = ()  # to which objects are moved

    def concerns(self, folder: str) -> bool:
        """Return whether the rule is about keys of this folder, all or some; "" is the bucket."""
        own = f"{folder}/" if folder else ""
        return self.prefix.startswith(own) or own.startswith(self.prefix)


@dataclass(frozen=True, slots=True)
class NoncurrentVersions:
    """Versions in the folder of a database that were replaced or deleted, and still cost."""

    versions: int
    size_bytes: int
    is_all: bool  # False: there are more


@dataclass(frozen=True, slots=True)
class BucketRules:
    """The rules of a bucket, as far as the store tells them."""

    versioning: str | NotTold  # "Enabled", "Suspended", or "" where it never was
    noncurrent: NoncurrentVersions | NotTold | None  # None: there was never versioning
    lifecycle: Sequence[LifecycleRule] | NotTold
    lock: str | NotTold  # the default retention in words; "no default"; empty: no object lock
