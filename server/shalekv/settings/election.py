"""Settings of the election of a writer."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import Settings


class ElectionSettings(Settings):
    """Who tries to be the writer, where several processes stand by."""

    elect: str = Field(
        default="",
        description="Where a lease decides who tries to be the writer: bucket (of the database), "
        "or etcd://HOST:PORT,HOST:PORT/name/of/the/key. Without the lease the server stands by. "
        "Not set: the server opens the database at once, and takes over from whoever has it.",
    )
    lease_ttl_ms: int = Field(
        default=3_000,
        ge=500,
        le=600_000,
        description="A lease that was not renewed for so long may be taken by another process. It "
        "is renewed each third of that. etcd counts whole seconds, and has a least time of its "
        "own.",
    )
