"""Runs the cases against a server: `python -m tests.conformance.runner HOST:PORT`.

Files that need a server with settings of their own are run when they are named with --topic, and
those that delete all keys with --destroy-all-data alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import grpc

from tests.conformance.calls import Caller
from tests.conformance.cases import Case, Topic, topics
from tests.conformance.matching import Disagreement
from tests.conformance.playing import BeforeStep, nothing, play


def new_prefix() -> str:
    """Return the prefix of the keys of a case; no other case has the same."""
    return f"conformance/{uuid.uuid4().hex}/"


@asynccontextmanager
async def caller_to(address: str) -> AsyncIterator[Caller]:
    """Calls to a server, with the limits that gRPC has by itself."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield Caller(channel)


def chosen(names: Iterable[str], *, may_destroy: bool) -> Iterator[Topic]:
    """The files to run: those that are named, or all that any server can be asked."""
    for topic in topics():
        is_wanted = topic.name in names if names else not topic.settings
        if is_wanted and (may_destroy or not topic.destroys):
            yield topic


async def disagreements(
    caller: Caller, cases: Iterable[Case], *, before_step: BeforeStep = nothing
) -> AsyncIterator[tuple[Case, str]]:
    """Each case, and what the server did otherwise; empty when it did as it should."""
    for case in cases:
        try:
            await play(caller, case, new_prefix(), before_step=before_step)
        except Disagreement as problem:
            yield case, str(problem)
        else:
            yield case, ""


async def run(address: str, wanted: Iterable[Topic]) -> int:
    """Play all cases and say how they went; the number of those that failed."""
    count = failed_count = 0
    async with caller_to(address) as caller:
        for topic in wanted:
            async for case, problem in disagreements(caller, topic.cases):
                count += 1
                if problem:
                    failed_count += 1
                    sys.stdout.write(f"FAILED {topic.name}: {case.name}\n    {problem}\n")
    sys.stdout.write(f"{count} cases, {failed_count} failed\n")
    return failed_count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT of the server")
    parser.add_argument("--topic", action="append", default=[], help="a file, without .json")
    parser.add_argument("--destroy-all-data", action="store_true")
    options = parser.parse_args()
    wanted = list(chosen(options.topic, may_destroy=options.destroy_all_data))
    return 1 if asyncio.run(run(options.address, wanted)) else 0


if __name__ == "__main__":
    sys.exit(main())
