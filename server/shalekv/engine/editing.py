"""Edits of the manifest by processes other than the writer, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.errors import ManifestConflict
from shalekv.store.cas import CasStore

EDIT_TIMEOUT_MS = 60_000


@asynccontextmanager
async def edit_deadline(store: CasStore, timeout_ms: int = EDIT_TIMEOUT_MS) -> AsyncIterator[None]:
    """Bounds an edit of the manifest, which otherwise goes on until it wins.

    Raises `ManifestConflict`; nobody knows then whether the edit was made.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1_000):
            yield
    except TimeoutError:
        message = (
            f"{store.url}: the manifest could not be edited within {timeout_ms} ms, because the "
            "store did not answer or other processes edited it first. Try again later"
        )
        raise ManifestConflict(message) from None
