"""A bucket for commands to use, and their environment."""

from __future__ import annotations

from tests.servers.s3 import S3Server

BUCKET, URL = "bucket", "s3://bucket/a/database"
ENDPOINT = "SHALEKV_STORE__ENDPOINT_URL"


def of(server: S3Server) -> dict[str, str]:
    """The environment of a process that uses a server."""
    return server.environment | {"SHALEKV_STORE__READ_ATTEMPTS": "3", ENDPOINT: server.endpoint}
