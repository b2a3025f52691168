"""Commands on buckets that cannot be used as they were told: each says in one line what is wrong.

It names the store, what was done with it, and what to do; it shows no traceback and no secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from shalekv.cli.exit_codes import ExitCode
from tests.e2e.bucket_commands import (
    BUCKET,
    COMPACT,
    CREATE,
    SECRET,
    SERVE,
    URL,
    Environment,
    assert_untouched,
    of,
    problems,
    two_phase,
)
from tests.kit.processes.processes import Processes
from tests.servers.mariadb import MariaServer, mariadb
from tests.servers.messages import Message
from tests.servers.process import free_port
from tests.servers.s3 import S3Server
from tests.servers.s3rver import s3rver
from tests.servers.serving import serving
from tests.servers.versitygw import versitygw

PAGE = b"<!doctype html><title>It works!</title>"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """An S3 server with a bucket."""
    with versitygw() as running:
        running.create_bucket(BUCKET)
        yield running


@pytest.fixture(scope="module")
def maria() -> Iterator[MariaServer]:
    """A MariaDB with an empty database."""
    with mariadb() as running:
        yield running


def assert_named(told: list[str], url: str, *said: str) -> None:
    """Each names the store and its operation, and says all of this."""
    for problem in told:
        store, operation, _ = problem.split(": ", 2)
        assert store == url, problem
        assert operation in {"list manifest/", "list verify/", "now clock"}, problem
        for part in said:
            assert part in problem, problem


async def test_no_such_bucket(processes: Processes, s3: S3Server) -> None:
    """The bucket and the endpoint are named: one of them is wrong."""
    url = "s3://nobodys-bucket/a/database"
    told = await problems(processes, of(s3), ExitCode.STORE, s3.secret_key, url=url)
    assert_named(told, url, f"there is no bucket nobodys-bucket at {s3.endpoint}: check both names")


async def test_wrong_secret(processes: Processes, s3: S3Server) -> None:
    """The secret is wrong, and not shown."""
    told = await problems(processes, of(s3, secret_key=SECRET), ExitCode.STORE, SECRET)
    assert_named(told, URL, "the secret key for bucket bucket", "is wrong")


async def test_unknown_key(processes: Processes, s3: S3Server) -> None:
    """The access key is nobody's."""
    env = of(s3, access_key="AKIA0NOBODY0NOBODY00")
    told = await problems(processes, env, ExitCode.STORE, s3.secret_key)
    assert_named(told, URL, "does not know the access key: check which credentials are set")


async def test_no_credentials(processes: Processes, s3: S3Server, tmp_path: Path) -> None:
    """Where none are found, nothing is sent, and it is said where they are looked for."""
    env = {
        "SHALEKV_STORE__ENDPOINT_URL": s3.endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path),
    }
    told = await problems(processes, env, ExitCode.STORE)
    assert_named(told, URL, "no request could be sent", "Set the credentials")


async def test_another_region(processes: Processes, s3: S3Server) -> None:
    """The region that the store names is what to set."""
    told = await problems(processes, of(s3, region="eu-central-1"), ExitCode.STORE)
    assert_named(told, URL, "is in another region", f"set --region {s3.region}")


async def test_nobody_is_there(processes: Processes, s3: S3Server) -> None:
    """The endpoint is named, and that nobody listens there."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    told = await problems(processes, of(s3, endpoint=endpoint), ExitCode.STORE, s3.secret_key)
    assert_named(told, URL, f"cannot connect to {endpoint}", "Is it up")


async def page(_request: Message) -> Message:
    """What a server for people answers, whatever is asked."""
    headers = [("Content-Type", "text/html"), ("Date", formatdate(usegmt=True))]
    return Message("HTTP/1.1 200 OK", headers, PAGE)


async def hang_up(_request: Message) -> None:
    """Close the connection without a word."""


async def test_a_server_of_pages(processes: Processes, s3: S3Server) -> None:
    """A server that answers all requests with a page is doubted to be one of S3."""
    async with serving(page) as endpoint:
        told = await problems(processes, of(s3, endpoint=endpoint), ExitCode.STORE)
    assert_named(told, URL, endpoint, "is it an S3 server?")


async def test_a_server_that_hangs_up(processes: Processes, s3: S3Server) -> None:
    """So is one that closes each connection without an answer."""
    async with serving(hang_up) as endpoint:
        told = await problems(processes, of(s3, endpoint=endpoint), ExitCode.STORE)
    assert_named(told, URL, f"{endpoint} broke off the request", "is it an S3 server?")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "s3://127.0.0.1:9000/bucket/database",
            "The host of an S3 server goes into --endpoint-url",
        ),
        ("s3://localhost:9000/database", "The host of an S3 server goes into --endpoint-url"),
        ("s3://key:secret@bucket/database", "credentials do not belong in a URL"),
        ("s3:///database", "names no bucket"),
        ("az://container/database", "check AZURE_STORAGE_ACCOUNT_NAME, which must be set"),
    ],
)
async def test_urls_that_lead_nowhere(
    processes: Processes, tmp_path: Path, url: str, says: str
) -> None:
    """It is a usage error, whatever is in the place of the bucket; nothing is sent."""
    (told,) = await problems(
        processes,
        {"HOME": str(tmp_path)},
        ExitCode.USAGE,
        "key:secret",
        url=url,
        commands=(CREATE,),
    )
    assert says in told


@pytest.mark.parametrize(
    ("cas", "records_url", "says"),
    [
        ("two_phase", "", "--cas two_phase needs a transactional store: set records_url"),
        ("native", f"mysql://me:{SECRET}@127.0.0.1/records", "for --cas two_phase alone"),
        ("two_phase", f"redis://me:{SECRET}@127.0.0.1/0", "names no transactional store"),
        ("two_phase", f"mysql://me:{SECRET}@127.0.0.1", "no host or no database"),
        ("two_phase", "sqlite:///no/such/folder/records.db", "/no/such/folder, which is no folder"),
    ],
)
async def test_records_that_are_not_named_as_they_must(
    processes: Processes, s3: S3Server, cas: str, records_url: str, says: str
) -> None:
    """It is a usage error that quotes no password."""
    env = two_phase(s3, records_url) | {"SHALEKV_STORE__CAS": cas}
    told = await problems(processes, env, ExitCode.USAGE, SECRET, commands=(CREATE, ("fsck",)))
    assert all(says in problem for problem in told), told


async def test_a_missing_driver(processes: Processes, s3: S3Server, tmp_path: Path) -> None:
    """What has to be installed is told, as a command."""
    (tmp_path / "asyncmy.py").write_text("raise ImportError(__name__)\n")
    env = two_phase(s3, f"mysql://me:{SECRET}@127.0.0.1/records") | {"PYTHONPATH": str(tmp_path)}
    told = await problems(processes, env, ExitCode.USAGE, SECRET, commands=(CREATE, ("fsck",)))
    assert all("pip install 'shalekv[server,mysql]'" in problem for problem in told), told


@pytest.mark.parametrize("scheme", ["mysql", "postgresql"])
async def test_records_that_are_down(processes: Processes, s3: S3Server, scheme: str) -> None:
    """The database of the records is named, without its password, by whoever would change."""
    place = f"127.0.0.1:{free_port()}/records"
    env = two_phase(s3, f"{scheme}://me:{SECRET}@{place}")
    commands = (CREATE, ("store", "verify"))
    for problem in await problems(processes, env, ExitCode.STORE, SECRET, commands=commands):
        assert f"{scheme}://{place}: prepare shalekv_records: " in problem
        assert "Is it up, and its address in records_url right?" in problem
    assert_untouched(s3)


async def test_a_wrong_password_of_records(
    processes: Processes, s3: S3Server, maria: MariaServer
) -> None:
    """Refused by the database, which is named, and the password is not."""
    env = two_phase(s3, replace(maria, password=SECRET).url("mysql"))
    commands = (CREATE, ("store", "verify"))
    for problem in await problems(processes, env, ExitCode.STORE, SECRET, commands=commands):
        assert f"mysql://{maria.host}:{maria.port}/{maria.database}: prepare " in problem
        assert "Check the place and the credentials in records_url" in problem
    assert_untouched(s3)


async def serve_for_once(processes: Processes, env: Environment, url: str) -> None:
    """Let a server create the database if there is none, serve it, and end."""
    server = await processes.serve(url, env=env)
    assert await server.stop() == ExitCode.OK, server.report()


@pytest.mark.parametrize("modes", [("native", "two_phase"), ("two_phase", "native")])
async def test_a_database_of_the_other_mode(
    processes: Processes, s3: S3Server, tmp_path: Path, modes: tuple[str, str]
) -> None:
    """Whoever would change it is told with which flag it was created; and it opens with that."""
    url = f"s3://{BUCKET}/created/{modes[0]}"
    envs = {"native": of(s3), "two_phase": two_phase(s3, f"sqlite://{tmp_path}/records.db")}
    commands = (CREATE, SERVE, COMPACT, ("admin", "recover"))
    await serve_for_once(processes, envs[modes[0]], url)
    told = await problems(processes, envs[modes[1]], ExitCode.USAGE, url=url, commands=commands)
    for problem in told:
        assert f"{url} was created with --cas {modes[0]}, and cannot be changed with" in problem
    await serve_for_once(processes, envs[modes[0]], url)


async def test_a_store_that_ignores_conditions(processes: Processes) -> None:
    """No database is created in it; what shows that it is unfit is deleted again."""
    with s3rver() as ignoring:
        ignoring.create_bucket(BUCKET)
        (told,) = await problems(processes, of(ignoring), ExitCode.STORE, commands=(CREATE,))
        assert told.startswith(f"{URL}: create ")
        assert "The store is unfit, and no database was created" in told
        assert "or --cas two_phase" in told
        assert_untouched(ignoring)


async def test_an_empty_bucket(processes: Processes, s3: S3Server) -> None:
    """Without --create nothing is created, and it is said how that is done."""
    commands = (SERVE, ("fsck",), COMPACT)
    code = ExitCode.DATABASE_NOT_FOUND
    for problem in await problems(processes, of(s3), code, commands=commands):
        assert f"{URL} holds no database" in problem
        assert "create a database there with `shalekv serve --create`" in problem
    assert_untouched(s3)
