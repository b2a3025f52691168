"""Commands on a bucket that cannot be used as they were told, and what they tell of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from urllib.parse import quote, urlsplit

from shalekv.cli.exit_codes import ExitCode
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.servers.s3 import S3Server

BUCKET = "bucket"
URL = f"s3://{BUCKET}/a/database"
SECRET = "wrong0secret0of0mine"
SERVE = ("serve", "--listen", "127.0.0.1:0", "--log-format", "json")
CREATE = (*SERVE, "--create")
COMPACT = ("compactor", "--once", "--log-format", "json")
# What asks the store in different ways; a server that is asked to create is one of them.
COMMANDS = (CREATE, SERVE, ("fsck",), ("store", "verify"), COMPACT)
QUICK = {"SHALEKV_STORE__READ_ATTEMPTS": "3"}

Environment = dict[str, str]


def of(server: S3Server, **changes: str) -> Environment:
    """The environment of a process that uses a server."""
    there = replace(server, **changes)
    return there.environment | QUICK | {"SHALEKV_STORE__ENDPOINT_URL": there.endpoint}


def two_phase(server: S3Server, records_url: str) -> Environment:
    """As `of`, with records that decide."""
    return of(server) | {
        "SHALEKV_STORE__CAS": "two_phase",
        "SHALEKV_STORE__RECORDS_URL": records_url,
    }


async def problem_of(command: Child, code: ExitCode, *secrets: str) -> str:
    """What a command tells that must fail, in the one line that it tells it in."""
    assert await command.exited() == code, command.report()
    said = command.stdout() + command.stderr()
    assert "Traceback" not in said, command.report()
    for secret in secrets:
        assert secret not in said, command.report()
    last = command.lines()[-1]
    if "text" not in last:
        assert [line for line in command.lines() if line["level"] == "error"] == [last]
        assert (last["event"], last["exit_code"]) == ("ended by an error", code)
        return str(last["problem"])
    problem = str(last["text"])
    repeats = [line for line in command.stderr().splitlines() if "request repeated" in line]
    assert problem.startswith("Error: "), command.report()
    assert len(command.stderr().splitlines()) == len(repeats) + 1, command.report()
    return problem.removeprefix("Error: ")


async def problems(
    processes: Processes,
    env: Environment,
    code: ExitCode,
    *secrets: str,
    url: str = URL,
    commands: tuple[tuple[str, ...], ...] = COMMANDS,
) -> list[str]:
    """What each of the commands tells about the store at `url`."""
    started = [processes.start(*argv, "--url", url, env=env) for argv in commands]
    return await asyncio.gather(*(problem_of(each, code, *secrets) for each in started))


def assert_untouched(server: S3Server) -> None:
    """There is nothing where the database would be."""
    place = urlsplit(URL)
    prefix = quote(place.path.lstrip("/"), safe="")
    listed = server.request("GET", f"/{place.netloc}?list-type=2&prefix={prefix}")
    assert b"<KeyCount>0</KeyCount>" in listed, listed
