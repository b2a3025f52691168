"""Calls of a command to its servers; a failure of one ends the process."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from shalekv.cli.console.connection import Target
from shalekv.cli.console.variables import TRACEPARENT_VARIABLE
from shalekv_client.errors import ShaleKVError
from shalekv_client.one_call import OneCallClient, run
from shalekv_client.operations import costs_of_calls
from shalekv_client.results import Cost

if TYPE_CHECKING:  # slow to import, and not needed for one call
    from shalekv_client.client import Client
    from shalekv_client.routing.retry import RetryPolicy

ResultT = TypeVar("ResultT")


def talk(
    target: Target,
    call: Callable[[Client], Awaitable[ResultT]],
    *,
    mutates: bool = False,
    retry: RetryPolicy | None = None,
) -> ResultT:
    """Run `call` with a client of the target that retries by `retry`, and return its result.

    A failure is printed, with its effect as far as known if the call `mutates`, and ends the
    process with a code that `exit_codes_of_calls` lists. The default of `retry` is `FAIL_FAST`.
    """
    import asyncio  # noqa: PLC0415 (slow)

    from shalekv.cli.console.failures import FAIL_FAST, end_process  # noqa: PLC0415 (slow)

    async def connected() -> ResultT:
        async with target.client(retry=retry or FAIL_FAST, reads=target.reads) as client:
            return await call(client)

    try:
        return asyncio.run(connected())
    except ShaleKVError as error:
        end_process(error, target, mutates=mutates)


def talk_once(
    target: Target,
    call: Callable[[OneCallClient], Awaitable[ResultT]],
    *,
    mutates: bool = False,
    refused: str = "Not written",
    tells_cost: bool = False,
) -> ResultT:
    """Run `call` as `talk` does; if it makes one data call, no event loop is needed.

    `refused` is said of a write whose condition does not hold. With `tells_cost`, a line on stderr
    says what the call has cost.
    """

    def open_client() -> Client:
        from shalekv.cli.console.failures import FAIL_FAST  # noqa: PLC0415 (slow)

        return target.client(retry=FAIL_FAST, reads=target.reads)

    client = OneCallClient(
        target.plain_address,
        open_client,
        timeout_ms=target.timeout_ms,
        traceparent=_traceparent(),
    )

    async def connected() -> ResultT:
        try:
            return await call(client)
        finally:
            await client.aclose()

    try:
        if not tells_cost:
            return run(connected())
        with costs_of_calls() as costs:
            result = run(connected())
        click.echo(_cost_line(costs), err=True)
        return result
    except ShaleKVError as error:
        from shalekv.cli.console.failures import end_process  # noqa: PLC0415 (slow)

        end_process(error, target, mutates=mutates, refused=refused)


def _cost_line(costs: Sequence[Cost]) -> str:
    """Say what a call has cost."""
    if not costs:
        return "Cost: this server does not tell it."
    cost = costs[-1]
    requests = [
        f"{count} {kind.replace('_', ' ')}{'s' if count > 1 else ''}"
        for kind in ("write", "list", "read", "delete", "record_write", "record_read")
        if (count := getattr(cost, f"{kind}s"))
    ]
    sent = ", ".join(requests) or "no requests"
    if cost.shared_by > 1:
        sent += f", shared by {cost.shared_by} calls"
    if cost.dollars is None:
        return f"Cost: {sent}; their prices are not known."
    dollars = f"{cost.dollars:.12f}".rstrip("0").rstrip(".")
    return f"Cost: {sent}; {dollars} USD."


def _traceparent() -> str:
    """Return the span that the environment names, as tools that start commands do; empty: none."""
    named = os.environ.get(TRACEPARENT_VARIABLE)
    if not named:
        return ""
    from shalekv_wire.trace_context import parse_traceparent  # noqa: PLC0415 (seldom needed)

    span = parse_traceparent(named)
    return "" if span is None else span.traceparent()
