"""The messages of gRPC's interop cases, made from testing.proto when they are imported."""

from __future__ import annotations

from typing import Any

import grpc

SERVICE = "/grpc.testing.TestService/"
# Keys of metadata that a server sends back: one with its header, one with its trailers.
ECHO_INITIAL = "x-grpc-test-echo-initial"
ECHO_TRAILING = "x-grpc-test-echo-trailing-bin"

# The classes have no types here: their users are judged by peers that have them.
messages: Any = grpc.protos(
    "tests/wire/interop/testing.proto"
)  # from the root, which is on the path


def sized(size: int) -> Any:
    """A payload of that many bytes."""
    return messages.Payload(body=bytes(size))
