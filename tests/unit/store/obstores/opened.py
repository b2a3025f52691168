"""Opens stores of both providers against a scripted server."""

from __future__ import annotations

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.obstores.opening import open_bucket
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import inline_runtime

AZURE_KEY = "c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA=="
BOTH = pytest.mark.parametrize("provider", [Provider.GOOGLE, Provider.AZURE])


def open_at(
    provider: Provider, endpoint: str, *, timeout_ms: int = 30_000, connections_max: int = 32
) -> ObjectStore:
    """The store ``database`` in ``bucket``; without credentials on Google."""
    settings = StoreSettings(
        endpoint_url=endpoint,
        anonymous=provider is Provider.GOOGLE,
        request_timeout_ms=timeout_ms,
        connections_max=connections_max,
    )
    return open_bucket(BucketUrl(provider, "bucket", "database"), inline_runtime(), settings)
