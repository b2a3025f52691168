"""Requests to open watches, checked."""

from __future__ import annotations

from shalekv.core.key_range import KeyRange
from shalekv.errors import InvalidRequest
from shalekv.server import requests
from shalekv.v1 import kv_pb2

_REFUSED = ("min_seq", "max_staleness_ms", "snapshot_id", "read_level")


def watched_range(create: kv_pb2.WatchCreate) -> KeyRange:
    """The range to watch. Raises `InvalidRequest` for whatever is wrong with the request."""
    requests.check_header(create.header)
    for name in _REFUSED:
        if getattr(create.header, name):
            problem = "a watch shows commits as they become durable, and no state: leave it out"
            raise InvalidRequest(f"create.header.{name}", problem)
    try:
        keys = requests.key_range(create.range)
    except InvalidRequest as error:
        raise requests.within("create", error) from None
    if keys.is_empty:
        raise InvalidRequest("create.range", "there is no key in it")
    return keys
