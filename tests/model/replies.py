"""How the models judge replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shalekv.errors import ShaleError
from shalekv.v1 import kv_pb2
from tests.kit.model import keys_in
from tests.sim.history import Got, Refusal, Told


def got(reply: Any) -> Got:
    found = Got(reply.value if reply.found else None, reply.seq, reply.expire_at_ms)
    assert reply.found or (reply.value, found[1:]) == (b"", (0, 0))
    return found


def check_reply(reply: Any, told: Told) -> None:
    if isinstance(reply, kv_pb2.WriteReply):
        assert tuple(reply.counters) == told.results
    elif isinstance(reply, kv_pb2.TxnReply):
        assert reply.succeeded is told.succeeded
        shown: dict[str, Callable[[Any], Got | int]] = {
            "get": lambda each: got(each.get),
            "counter": lambda each: each.counter,
        }
        kinds = [each.WhichOneof("result") for each in reply.results]
        results = zip(kinds, reply.results, strict=True)
        assert told.results == tuple(kind and shown[kind](each) for kind, each in results)


def check_refusal(error: BaseException | None, refusal: Refusal) -> None:
    """The error is the one that the model expects."""
    assert isinstance(error, ShaleError), error
    assert error.reason == refusal.reason
    if refusal.found_seq is not None:
        assert getattr(error, "found_seq") == refusal.found_seq  # noqa: B009 - of one kind of error


def check_scan(
    replies: Sequence[kv_pb2.ScanReply], request: kv_pb2.ScanRequest, now: Mapping[bytes, Got]
) -> None:
    """A scan shows all that is there of its range, in its order, up to its limits."""
    wanted = sorted(keys_in([*now], request.range), reverse=request.reverse)
    expected: list[bytes] = []
    size_bytes = 0
    for key in wanted:
        is_full = request.limit_bytes and size_bytes >= request.limit_bytes
        if is_full or (request.limit and len(expected) >= request.limit):
            break
        expected.append(key)
        size_bytes += len(key) + len(now[key].value or b"")
    shown = [
        (entry.key, Got(entry.value, entry.seq, entry.expire_at_ms))
        for reply in replies
        for entry in reply.entries
    ]
    assert shown == [(key, now[key]) for key in expected]
    assert replies[-1].more == (len(expected) < len(wanted))
