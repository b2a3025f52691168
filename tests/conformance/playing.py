"""Plays one case: its steps in order, each against what it expects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from tests.conformance.calls import Caller, CallFailed, Stream, method_of
from tests.conformance.cases import Case
from tests.conformance.matching import Disagreement, match_failure, match_message, shown
from tests.conformance.notation import (
    BadCase,
    Json,
    Variables,
    bytes_of,
    elements_of,
    int_of,
    message_of,
)
from tests.kit.uuids import new_uuid7

WAIT_S = 60
TEN_DAYS_MS = 10 * 86_400_000
MESSAGE_BYTES_MAX = 3_670_016
_CALL_NAMES = {"call", "about", "request", "raw", "reply", "commit", "each", "exchange", "error"}


BeforeStep: TypeAlias = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Do nothing between two steps."""


async def play(
    caller: Caller,
    case: Case,
    prefix: str,
    *,
    before_step: BeforeStep = nothing,
) -> None:
    """Raise `Disagreement` unless the server does as the case says. REQUIRES: `prefix` is new.

    `before_step` changes how the server stores its data, and not what it answers.
    """
    variables: Variables = {
        "p": prefix,
        "uuid7": new_uuid7(),
        "old_uuid7": new_uuid7(age_ms=TEN_DAYS_MS),
    }
    for number, step in enumerate(case.steps, 1):
        await before_step()
        await _step(caller, step, variables, f"step {number}")


async def _step(caller: Caller, step: Json, variables: Variables, path: str) -> None:
    match step:
        case {"wait_until": awaited}:
            await _wait_until(caller, awaited, variables, path)
        case {"together": [*steps]}:
            calls = [_step(caller, s, variables, f"{path}.{n}") for n, s in enumerate(steps, 1)]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        case {"call": name}:
            if others := set(step) - _CALL_NAMES:
                raise BadCase(f"{path}: what is {', '.join(sorted(others))}?")
            await _call(caller, method_of(name), step, variables, f"{path} ({name})")
        case _:
            raise BadCase(f"{path}: this is no step: {step!r}")


async def _wait_until(caller: Caller, step: Json, variables: Variables, path: str) -> None:
    """Repeat the step until the server does as it says."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return await _step(caller, step, variables, path)
        except Disagreement:
            if time.monotonic() > deadline:
                raise


async def _call(
    caller: Caller, method: MethodDescriptor, step: Json, variables: Variables, path: str
) -> None:
    try:
        if method.client_streaming:
            await _exchange(caller.stream(method), step, variables, path)
        else:
            request = request_bytes(method, step, variables)
            if method.server_streaming:
                _match_stream(step, await caller.unary_stream(method, request), variables, path)
            else:
                _match_reply(step, await caller.unary(method, request), variables, path)
    except CallFailed as failed:
        if "error" not in step:
            raise Disagreement(path, f"failed with {failed.failure}") from None
        match_failure(step["error"], failed.failure, variables, path)
    else:
        if "error" in step:
            raise Disagreement(path, "succeeded, and should have failed")


def request_bytes(method: MethodDescriptor, step: Json, variables: Variables) -> bytes:
    """The request of a step, or of one `send` of an exchange."""
    if "raw" in step:
        return bytes_of(step["raw"], variables)
    return message_of(method.input_type, step.get("request", {}), variables).SerializeToString()


def _match_reply(step: Json, reply: Any, variables: Variables, path: str) -> None:
    if "error" in step:
        raise Disagreement(path, f"should have failed, and answered {shown(reply)}")
    if "commit" in step:
        variables[step["commit"]] = reply.header.seq
    if "reply" in step:
        match_message(step["reply"], reply, variables, path)


def _match_stream(step: Json, replies: list[Message], variables: Variables, path: str) -> None:
    """`each` is compared with every message, `reply` with all of them merged."""
    if not replies:
        raise Disagreement(path, "ended without a message")
    whole = type(replies[0])()
    for index, reply in enumerate(replies):
        if reply.ByteSize() > MESSAGE_BYTES_MAX:
            raise Disagreement(f"{path}[{index}]", f"{reply.ByteSize()} bytes in one message")
        whole.MergeFrom(reply)
    _match_reply(step, whole, variables, path)
    for index, reply in enumerate(replies):
        if "each" in step:
            match_message(step["each"], reply, variables, f"{path}[{index}]")


async def _exchange(stream: Stream, step: Json, variables: Variables, path: str) -> None:
    """Send and receive in the order of the step, then end the stream."""
    try:
        for number, act in enumerate(step["exchange"], 1):
            place = f"{path}.{number}"
            match act:
                case {"send": request}:
                    await stream.send(request_bytes(stream.method, {"request": request}, variables))
                case {"raw": data}:
                    await stream.send(bytes_of(data, variables))
                case {"receive": results}:
                    await _receive(stream, list(elements_of(results, variables)), place)
                case _:
                    raise BadCase(f"{place}: this is no act of an exchange: {act!r}")
        if "error" not in step:
            await stream.end()  # gRPC may lose the error of a call that ends at the same time
        if (reply := await stream.read()) is not None:
            raise Disagreement(path, f"more than expected: {shown(reply)}")
    finally:
        stream.close()


async def _receive(stream: Stream, expected: list[tuple[Json, Variables]], path: str) -> None:
    """Receive as many results as expected, in any order; compare each with that of its id."""
    found: dict[int, list[Message]] = {}
    count = 0
    while count < len(expected):
        reply: Any = await stream.read()
        if reply is None:
            raise Disagreement(path, f"the stream ended after {count} results")
        if not reply.results:
            raise Disagreement(path, "a reply holds no result")
        for result in reply.results:
            found.setdefault(result.id, []).append(result)
            count += 1
    for result, variables in expected:
        number = int_of(result["id"], variables)
        _take(result, found.get(number, []), variables, f"{path}.id {number}")
    if rest := [result for results in found.values() for result in results]:
        raise Disagreement(path, f"not expected: {shown(rest)}")


def _take(expected: Json, found: list[Message], variables: Variables, path: str) -> None:
    """Remove the first of the results with one id that is as expected."""
    problem = Disagreement(path, "there is no such result")
    for index, result in enumerate(found):
        try:
            match_message(expected, result, variables, path)
        except Disagreement as other:
            problem = other
        else:
            del found[index]
            return
    raise problem
