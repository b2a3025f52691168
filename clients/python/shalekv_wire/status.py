"""The end of a call: the status codes of gRPC, and the error of a call that has failed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

# Keys are lower-case; those that end with `-bin` have bytes, and all others have text.
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

DETAILS_KEY = "grpc-status-details-bin"


class StatusCode(IntEnum):
    """The status codes of gRPC, with its numbers and names."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallFailed(Exception):
    """A call that has ended with another status than OK."""

    def __init__(
        self,
        code: StatusCode,
        message: str = "",
        *,
        metadata: Metadata = (),
        is_unsent: bool = False,
    ) -> None:
        """Create the error of a call.

        `metadata` is that of the trailers and of the header. `is_unsent` says that no server has
        begun to process the call: it had no connection, or the server has refused the stream.
        """
        super().__init__(f"{code.name}: {message}" if message else code.name)
        self.code = code
        self.message = message
        self.metadata = metadata
        self.is_unsent = is_unsent

    @property
    def details(self) -> bytes:
        """The encoded `google.rpc.Status` with the details of the error; empty if there is none."""
        for key, value in self.metadata:
            if key == DETAILS_KEY and isinstance(value, bytes):
                return value
        return b""
