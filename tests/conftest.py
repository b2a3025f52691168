"""The servers that tests of several folders share."""

from __future__ import annotations

from tests.servers.fixtures import (
    azure_server,
    dynamo_server,
    etcd_server,
    google_server,
    maria_server,
    moto_server,
    postgres_server,
    s3_server,
)

__all__ = [
    "azure_server",
    "dynamo_server",
    "etcd_server",
    "google_server",
    "maria_server",
    "moto_server",
    "postgres_server",
    "s3_server",
]
