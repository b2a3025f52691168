"""What a client of the test is: something that sends operations to one server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shalekv_client import ConditionFailed, NotACounter
from tests.linearizability.operations import Operation, Reply, Result, Seen


class Sender(Protocol):
    """A client with a connection of its own."""

    async def send(self, operation: Operation, *, key: bytes) -> Reply:
        """Send an operation and wait for what is told of it; `key` is its idempotency key.

        Raises the errors of `shalekv_client`: what is not `NotApplied` leaves the outcome open.
        """
        ...

    async def close(self) -> None: ...


def refusal(error: ConditionFailed | NotACounter) -> Reply:
    """A refusal that depends on the state is an answer like any other."""
    if isinstance(error, NotACounter):
        return Reply(not_a_counter=True)
    return Reply(succeeded=False, found_seq=error.found_seq)


def prefix_of(operation: Operation) -> bytes:
    """What the keys of an operation begin with, and no others."""
    prefix = operation.keys[0][:-1]
    assert all(key[:-1] == prefix for key in operation.keys), operation
    return prefix


def scanned(operation: Operation, found: Mapping[bytes, Seen]) -> tuple[Result, ...]:
    """What a scan has shown of each key; it may show no others."""
    keys = operation.keys
    assert found.keys() <= set(keys), f"{operation} shows {found}"
    return tuple(found.get(key) for key in keys)


def nothing(operation: Operation) -> tuple[Result, ...]:
    """The results of changes that have none."""
    return (None,) * len(operation.then)
