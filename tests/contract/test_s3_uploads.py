"""Uploads that were never completed are found and aborted, on a real server."""

from __future__ import annotations

import asyncio
import time

import pytest

from shalekv.store.s3.calls import Calls
from shalekv.store.s3.stale_uploads import abort_stale_uploads
from tests.kit.s3.opening import new_store
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw

BUCKET = "bucket"


async def test_an_abandoned_upload_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not old enough stays, and goes when it is."""
    with versitygw() as server:
        server.create_bucket(BUCKET)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        await asyncio.to_thread(begin, server)
        store = new_store(server.endpoint)
        calls: Calls = store._calls  # noqa: SLF001 - its own rule is an hour at least
        now_ms = int(time.time() * 1_000)
        young = await abort_stale_uploads(calls, BUCKET, "folder/", before_ms=now_ms - 60_000)
        old = await abort_stale_uploads(calls, BUCKET, "folder/", before_ms=now_ms + 60_000)
        again = await abort_stale_uploads(calls, BUCKET, "folder/", before_ms=now_ms + 60_000)
        await store.close()
    assert (young, old, again) == (0, 2, 0)


def begin(server: S3Server) -> None:
    """Begin two uploads in the folder, and one beside it."""
    for key in ("folder/levels/1.sst", "folder/levels/2.sst", "other/1.sst"):
        server.request("POST", f"/{BUCKET}/{key}?uploads=")
