"""Commands on buckets that cannot be used: each prints one line with the problem.

The line names the store, the request, and what to do; there is no traceback and no secret.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from click.testing import CliRunner

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.servers.messages import Message, serving
from tests.servers.object_stores import s3rver, versitygw
from tests.servers.process import free_port
from tests.servers.s3 import S3Server

BUCKET, URL = "bucket", "s3://bucket/a/database"
ENDPOINT = "SHALEKV_STORE__ENDPOINT_URL"


def of(server: S3Server) -> dict[str, str]:
    """The environment of a process that uses a server."""
    return server.environment | {"SHALEKV_STORE__READ_ATTEMPTS": "3", ENDPOINT: server.endpoint}


SECRET = "wrong0secret0of0mine"
SERVE = ("serve", "--listen", "127.0.0.1:0", "--log-format", "json")
CREATE = (*SERVE, "--create")
COMPACT = ("compactor", "--once", "--log-format", "json")
FSCK, VERIFY = ("fsck",), ("store", "verify")
READ = ("reader", "--listen", "127.0.0.1:0", "--log-format", "json")
COLLECT = ("collector", "--once", "--log-format", "json")
OF_A_URL = (
    FSCK,
    ("manifest",),
    ("wal",),
    ("levels",),
    ("snapshot", "list"),
    ("consumers", "list"),
    ("admin", "recover"),
    ("admin", "leases", "list"),
    ("clone", "--to", f"s3://{BUCKET}/implied-clone"),
    ("backup", "create", "--to", f"s3://{BUCKET}/implied-backups"),
)
CAS, RECORDS = "SHALEKV_STORE__CAS", "SHALEKV_STORE__RECORDS_URL"
NOBODY = f"127.0.0.1:{free_port()}"
PAGE = b"<!doctype html><title>It works!</title>"


@dataclass(frozen=True, slots=True)
class Case:
    """Environment of a command, its URL, and the line that it must print."""

    name: str
    says: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = URL
    code: ExitCode = ExitCode.STORE
    command: tuple[str, ...] = CREATE


def records(url: str, cas: str = "two_phase") -> dict[str, str]:
    return {CAS: cas, RECORDS: url}


HOST = ("The host of an S3 server goes into --endpoint-url",)
MYSQL = f"mysql://me:{SECRET}@127.0.0.1"
CASES = [
    Case(
        "no such bucket",
        ("s3://nobodys/a", "list manifest/", "there is no bucket nobodys at", "check both names"),
        url="s3://nobodys/a",
        command=FSCK,
    ),
    Case(
        "wrong secret",
        (URL, "the secret key for bucket bucket", "is wrong"),
        {"AWS_SECRET_ACCESS_KEY": SECRET},
        command=SERVE,
    ),
    Case(
        "unknown key",
        ("does not know the access key: check which credentials are set",),
        {"AWS_ACCESS_KEY_ID": "AKIA0NOBODY0NOBODY00"},
        command=COMPACT,
    ),
    Case(
        "no credentials",
        ("no request could be sent", "Set the credentials"),
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nowhere"},
        command=VERIFY,
    ),
    Case(
        "another region",
        ("is in another region", "set --region us-east-1"),
        {"AWS_REGION": "eu-central-1", "AWS_DEFAULT_REGION": "eu-central-1"},
    ),
    Case(
        "nobody is there",
        (f"cannot connect to http://{NOBODY}", "Is it up"),
        {ENDPOINT: f"http://{NOBODY}"},
    ),
    Case("host in the URL", HOST, url="s3://127.0.0.1:9000/bucket/a", code=ExitCode.USAGE),
    Case(
        "credentials in the URL",
        ("credentials do not belong in a URL",),
        url=f"s3://key:{SECRET}@bucket/a",
        code=ExitCode.USAGE,
    ),
    Case(
        "no account",
        ("check AZURE_STORAGE_ACCOUNT_NAME, which must be set",),
        url="az://container/a",
        code=ExitCode.USAGE,
    ),
    Case(
        "no records",
        ("--cas two_phase needs a transactional store: set records_url",),
        records(""),
        code=ExitCode.USAGE,
    ),
    Case(
        "needless records",
        ("for --cas two_phase alone",),
        records(f"{MYSQL}/records", "native"),
        code=ExitCode.USAGE,
        command=FSCK,
    ),
    Case(
        "unknown records",
        ("names no transactional store",),
        records(f"redis://me:{SECRET}@127.0.0.1/0"),
        code=ExitCode.USAGE,
    ),
    Case(
        "records without a folder",
        ("/no/such/folder, which is no folder",),
        records("sqlite:///no/such/folder/records.db"),
        code=ExitCode.USAGE,
    ),
    Case(
        "records that are down",
        (f"mysql://{NOBODY}/records: prepare shalekv_records: ", "Is it up, and its address"),
        records(f"mysql://me:{SECRET}@{NOBODY}/records"),
    ),
    Case(
        "empty bucket",
        (f"{URL} holds no database", "create a database there with `shalekv serve --create`"),
        code=ExitCode.DATABASE_NOT_FOUND,
        command=COMPACT,
    ),
]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """An S3 server with a bucket."""
    with versitygw() as running:
        running.create_bucket(BUCKET)
        yield running


async def problem_of(command: Child, code: ExitCode) -> str:
    """Run a command that must fail; return the problem, in its one line."""
    assert await command.exited() == code, command.report()
    said = command.stdout() + command.stderr()
    assert "Traceback" not in said, command.report()
    assert SECRET not in said, command.report()
    last = command.lines()[-1]
    if "text" not in last:
        assert [line for line in command.lines() if line["level"] == "error"] == [last]
        assert (last["event"], last["exit_code"]) == ("ended by an error", code)
        return str(last["problem"])
    repeats = [line for line in command.stderr().splitlines() if "request repeated" in line]
    assert str(last["text"]).startswith("Error: "), command.report()
    assert len(command.stderr().splitlines()) == len(repeats) + 1, command.report()
    return str(last["text"])


def assert_untouched(server: S3Server) -> None:
    place = urlsplit(URL)
    prefix = quote(place.path.lstrip("/"), safe="")
    listed = server.request("GET", f"/{place.netloc}?list-type=2&prefix={prefix}")
    assert b"<KeyCount>0</KeyCount>" in listed, listed


async def test_the_problem_is_reported(processes: Processes, s3: S3Server) -> None:
    """In one line, with the exit code of its kind; nothing is created."""
    started = [
        processes.start(*case.command, "--url", case.url, env=of(s3) | dict(case.env))
        for case in CASES
    ]
    problems = await asyncio.gather(
        *(problem_of(each, case.code) for each, case in zip(started, CASES, strict=True))
    )
    for case, problem in zip(CASES, problems, strict=True):
        for part in case.says:
            assert part in problem, f"{case.name}: {problem}"
    assert_untouched(s3)


async def page(_request: Message) -> Message:
    headers = [("Content-Type", "text/html"), ("Date", formatdate(usegmt=True))]
    return Message("HTTP/1.1 200 OK", headers, PAGE)


async def hang_up(_request: Message) -> None:
    """Close the connection without a word."""


async def test_servers_of_another_kind_are_doubted(processes: Processes, s3: S3Server) -> None:
    """One that answers all requests with a page, and one that closes each connection."""
    for answer, says in ((page, ""), (hang_up, " broke off the request")):
        async with serving(answer) as endpoint:
            there = replace(s3, endpoint=endpoint)
            command = processes.start(*CREATE, "--url", URL, env=of(there))
            problem = await problem_of(command, ExitCode.STORE)
        assert f"{endpoint}{says}" in problem
        assert "is it an S3 server?" in problem


async def test_a_missing_driver(processes: Processes, s3: S3Server, tmp_path: Path) -> None:
    """The error of a missing driver has the command that installs it."""
    (tmp_path / "asyncmy.py").write_text("raise ImportError(__name__)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = of(s3) | records(f"{MYSQL}/records") | {"PYTHONPATH": path}
    main = "from shalekv.cli.main import main; main()"  # imports all of it in a new process
    command = processes.start("-c", main, *CREATE, "--url", URL, program=sys.executable, env=env)
    problem = await problem_of(command, ExitCode.USAGE)
    assert "pip install 'shalekv[mysql]'" in problem


@pytest.mark.parametrize("modes", [("native", "two_phase"), ("two_phase", "native")])
async def test_a_database_of_the_other_mode(
    processes: Processes, s3: S3Server, tmp_path: Path, modes: tuple[str, str]
) -> None:
    """A command that would change it names the flag with which it was created."""
    url = f"s3://{BUCKET}/created/{modes[0]}"
    two_phase = of(s3) | records(f"sqlite://{tmp_path}/records.db")
    envs = {"native": of(s3), "two_phase": two_phase}
    server = await processes.serve(url, env=envs[modes[0]])
    assert await server.stop() == ExitCode.OK, server.report()
    refused = [
        processes.start(*argv, "--url", url, env=envs[modes[1]])
        for argv in (CREATE, COMPACT, ("admin", "recover"))
    ]
    for command in refused:
        problem = await problem_of(command, ExitCode.USAGE)
        assert f"{url} was created with --cas {modes[0]}, and cannot be changed with" in problem


async def test_records_imply_two_phase(processes: Processes, s3: S3Server, tmp_path: Path) -> None:
    """No command that takes a URL needs --cas beside the records of the database."""
    url = f"s3://{BUCKET}/implied"
    env = of(s3) | {RECORDS: f"sqlite://{tmp_path}/records.db"}
    server = await processes.serve(url, env=env)
    reader = processes.start(*READ, "--url", url, env=env)
    await reader.ready()
    assert await server.stop() == ExitCode.OK, server.report()
    assert await reader.stop() == ExitCode.OK, reader.report()
    ending = [processes.start(*argv, "--url", url, env=env) for argv in (COMPACT, COLLECT)]
    for each in ending:
        assert await each.exited() == ExitCode.OK, each.report()
    for argv in OF_A_URL:
        result = await asyncio.to_thread(CliRunner(env=env).invoke, shalekv, [*argv, "--url", url])
        assert result.exit_code == ExitCode.OK, (argv, result.output)


async def test_a_store_that_ignores_conditions(processes: Processes) -> None:
    """No database is created in it; what shows that it is unfit is deleted again."""
    with s3rver() as ignoring:
        ignoring.create_bucket(BUCKET)
        command = processes.start(*CREATE, "--url", URL, env=of(ignoring))
        problem = await problem_of(command, ExitCode.STORE)
        assert problem.startswith(f"{URL}: create ")
        assert "The store is unfit, and no database was created" in problem
        assert "or --cas two_phase" in problem
        assert_untouched(ignoring)
