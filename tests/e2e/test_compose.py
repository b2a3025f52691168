"""Services of the compose files of docker/, as plain processes with the users and the folders that
their images give them, on a real S3 server and a real MariaDB.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Client, RetryPolicy, TlsOptions, Unauthenticated, Unreachable
from tests.e2e.composition import IS_ROOT, Composition
from tests.kit.compose_file import DOCKER, DOCKERFILE, MINIO, TLS, Service, read_compose
from tests.kit.dockerfile import read_dockerfile
from tests.kit.processes.child import Line, event
from tests.servers.object_stores import versitygw
from tests.servers.process import folder, free_port
from tests.servers.record_stores import MariaServer, mariadb
from tests.servers.s3 import S3Server

README = (DOCKER / "README.md").read_text(encoding="utf-8")
# What the section about TLS runs in containers: to make a token, and to ask for safekeepers.
README_TLS = (
    *re.findall(r"^\$tls run --rm certificates (.+)$", README, re.MULTILINE),
    *re.findall(r"^\$tls exec writer-quorum (shalekv safekeeper .+)$", README, re.MULTILINE),
)
ONCE = RetryPolicy(attempts_max=1)
Accept = Callable[[Line], bool]

# So that a compaction and a collection come within the time of a test.
IMPATIENT = {
    "SHALEKV_COMPACTOR__COMPACTOR_IDLE_POLL_MS": "100",
    "SHALEKV_COMPACTOR__WAL_TRIGGER_AGE_MS": "100",
    "SHALEKV_COLLECTOR__COLLECT_INTERVAL_MS": "200",
    "SHALEKV_COLLECTOR__COLLECT_AGE_S": "1",
}


@dataclass(frozen=True, slots=True)
class Roles:
    """The names of the services of one database."""

    writer: str
    compactor: str
    collector: str
    readers: tuple[str, ...] = ()


NATIVE = Roles("writer", "compactor", "collector", ("reader-1", "reader-2"))
TWO_PHASE = Roles("writer-two-phase", "compactor-two-phase", "collector-two-phase")
QUORUM = Roles("writer-quorum", "compactor-quorum", "collector-quorum", ("reader-quorum",))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """An S3 server without buckets, as that of the file begins."""
    with versitygw() as running:
        yield running


@pytest.fixture(scope="module")
def records() -> Iterator[MariaServer]:
    """A MariaDB with an empty database."""
    with mariadb() as running:
        yield running


@pytest.fixture
def home() -> Iterator[Path]:
    """The folder of the volumes: unlike the folders of pytest, every user may enter it."""
    with folder() as made:
        made.chmod(0o755)
        yield made


def composition(
    home: Path, s3: S3Server | None, records: MariaServer | None = None, *more: str
) -> Composition:
    """Processes of compose.yaml on these servers, or with `more` files on those that it starts."""
    variables = {
        "SHALEKV_S3_ACCESS_KEY": s3.access_key if s3 else "shalekv",
        "SHALEKV_S3_SECRET_KEY": s3.secret_key if s3 else "shalekv-secret",
        "SHALEKV_MARIADB_PASSWORD": records.password if records else "of-nobody",
        "SHALEKV_BUCKET": "tls" if TLS in more else "shalekv",  # for databases of its own
    }
    hosts = {"s3:9000": s3.endpoint.removeprefix("http://")} if s3 else {}
    if records is not None:
        hosts["mariadb:3306"] = f"{records.host}:{records.port}"
    return Composition(read_compose(variables, *more), hosts, home, IMPATIENT)


async def test_what_compose_starts_works(s3: S3Server, home: Path) -> None:
    """From an empty S3 server to data that outlives a kill; all end with 0 when asked to."""
    with composition(home, s3) as services:
        await lives(services, NATIVE)


async def test_what_the_profile_two_phase_starts_works(
    s3: S3Server, records: MariaServer, home: Path
) -> None:
    """The same with commits that MariaDB decides, on the same S3 server."""
    with composition(home, s3, records) as services:
        await lives(services, TWO_PHASE)
    engine = create_async_engine(records.url())
    async with engine.connect() as connection:
        tables = (await connection.execute(text("SHOW TABLES"))).all()
    await engine.dispose()
    assert tables, "nothing was decided there"


async def test_what_the_profile_quorum_starts_works(s3: S3Server, home: Path) -> None:
    """The same with a log that two of three safekeepers have, while the third is down."""
    with composition(home, s3) as services:
        await services.up([QUORUM.writer])
        await services.healthy(QUORUM.writer)  # all three have to be there when it is created
        assert await services.stop("safekeeper-2") == ExitCode.OK
        await lives(services, QUORUM)


async def test_what_the_file_for_tls_starts_works(s3: S3Server, home: Path) -> None:
    """With certificates and the first token of docker/README.md, only who has one is served."""
    with composition(home, s3, None, TLS) as services:
        await services.up(["certificates"])
        assert await services["certificates"].exited() == ExitCode.OK
        create, status = README_TLS
        token = services.run_as("certificates", *create.split())
        assert await token.exited() == ExitCode.OK, token.report()
        secret = token.stdout().strip()
        names = (QUORUM.writer, *QUORUM.readers)
        await services.up(names)
        for name in names:
            await services[name].ready()
        tls = TlsOptions(ca=home / "tls" / "ca.crt")
        addresses = [services.address(name) for name in names]
        async with Client(addresses, tls=tls, access_token=secret) as client:
            await client.put(b"key", b"value")
            found = await client.get(b"key")
        assert found is not None
        assert found.value == b"value"
        for options, refusal in (
            ({"tls": tls}, Unauthenticated),
            ({"tls": tls, "access_token": f"{secret[:-1]}x"}, Unauthenticated),
            ({"tls": True, "access_token": secret}, Unreachable),  # it does not trust the server
            ({}, Unreachable),
        ):
            async with Client(addresses[0], retry=ONCE, coalesce=False, **options) as client:
                with pytest.raises(refusal):
                    await client.put(b"key", b"other")
        members = services.run(*status.split(), name=QUORUM.writer)
        assert await members.exited() == ExitCode.OK, members.report()
        assert members.stdout().count("sound") == 3
        for name in (*QUORUM.readers, QUORUM.writer, "safekeeper-1"):
            assert await services.stop(name) == ExitCode.OK, services[name].report()
            assert not [line for line in services[name].lines() if line.get("level") == "error"]


async def test_a_volume_that_belongs_to_root(s3: S3Server, home: Path) -> None:
    """A mount point that the image lacks is root's: the safekeeper ends with that reason."""
    with composition(home, s3) as services:
        await services.up(["bucket"])
        assert await services["bucket"].exited() == ExitCode.OK
        child = services.start("safekeeper-1", mount_point="/var/lib/safekeeper-1")
        assert await child.exited() == ExitCode.STORE, child.report()
        (line,) = child.lines()
    own = (os.geteuid(), os.getegid())
    uid, gid = read_dockerfile("Dockerfile").user if IS_ROOT else own
    path = home / "safekeeper-1"
    assert line["problem"] == (
        f"{path}: open data folder: user {uid} cannot write it: Permission denied: "
        f"make this user its owner (chown -R {uid}:{gid} {path})"
    )


@pytest.mark.soak
async def test_what_compose_starts_works_on_minio(records: MariaServer, home: Path) -> None:
    """MinIO serves a database of each profile, and refuses a volume that belongs to root."""
    with composition(home, None, records, MINIO) as services:
        refused = services.start("s3", mount_point="/srv/data")
        assert await refused.exited() != 0
        assert "access denied" in refused.report()
        (home / "minio").rmdir()
        services.start("s3")
        await services.healthy("s3")
        await services.up(["bucket"])
        await services["bucket"].exited()
        verify = services.run("shalekv", "store", "verify", name="writer")
        assert await verify.exited() == ExitCode.OK, verify.report()
        for roles in (NATIVE, TWO_PHASE, QUORUM):
            await lives(services, roles)
        assert await services.stop("s3") == 0, services["s3"].report()


async def test_a_database_in_a_volume(home: Path) -> None:
    """The container that docker/README.md runs keeps database and cache in volumes of its user."""
    (command,) = re.findall(r"^docker run --detach(.*?[^\\])\n", README, re.MULTILINE | re.DOTALL)
    given, _, argv = command.replace("\\\n", " ").partition("shalekv:local")
    volumes = re.findall(r"--volume (\S+)", given)
    container = {"build": {"dockerfile": DOCKERFILE}, "command": argv.split(), "volumes": volumes}
    json_logs = {"SHALEKV_SERVER__LOG_FORMAT": "json"}
    with Composition({"it": Service("it", container)}, {}, home, json_logs) as services:
        services.start("it")
        async with Client(await services["it"].ready()) as client:
            await client.put(b"key", b"value")
        assert await services.stop("it") == ExitCode.OK, services["it"].report()
        again = services.start("it")
        async with Client(await again.ready()) as client:
            found = await client.get(b"key")
        assert found is not None
        assert found.value == b"value"
        for jobs in ("compacting", "collecting"):  # as long as they start, they don't end in time
            await again.line(event(jobs))
        assert await services.stop("it") == ExitCode.OK, again.report()
        assert {line["level"] for line in again.lines()} == {"info"}, again.report()
    assert list((home / "shalekv" / "main" / "wal").iterdir())
    assert (home / "shalekv-cache").is_dir()


async def test_a_fenced_container_stays_down(s3: S3Server, home: Path) -> None:
    """It ends with 0, which `restart: on-failure` takes for an end, and its successor serves on."""
    with composition(home, s3) as services:
        await services.up(["writer"])
        await services.healthy("writer")
        await put(services, "writer", b"before", b"1")
        fenced = services["writer"]
        successor = f"127.0.0.1:{free_port()}"
        services.start("writer", address=successor)
        assert await fenced.exited() == ExitCode.OK, fenced.report()
        assert "this container stays down" in fenced.stderr()
        assert any(line.get("exit_code") == ExitCode.FENCED for line in fenced.lines())
        await services["writer"].ready()
        async with Client(successor) as client:
            found = await client.get(b"before")
        assert found is not None
        assert found.value == b"1"
        assert await services.stop("writer") == ExitCode.OK


async def lives(services: Composition, roles: Roles) -> None:
    """Start everything, use it, kill the writer, continue, and stop everything."""
    await services.up([roles.writer, *roles.readers, roles.compactor, roles.collector])
    await put(services, roles.writer, b"from/python", b"1")
    assert await grpcurl_get(services, roles.writer, b"from/python") == b"1"
    await services[roles.compactor].line(event("compacted"))
    await services[roles.collector].line(lambda line: line.get("deleted_objects", 0) > 0)

    await services[roles.writer].kill()
    assert not await services.is_healthy(roles.writer)
    services.start(roles.writer)
    await services.healthy(roles.writer)
    await put(services, roles.writer, b"after/kill", b"2")
    async with Client(services.address(roles.writer)) as client:
        found = [(entry.key, entry.value) async for entry in client.scan()]
    assert found == [(b"after/kill", b"2"), (b"from/python", b"1")]

    for name in roles.readers:
        await services.healthy(name)
        async with Client([services.address(roles.writer), services.address(name)]) as client:
            await client.put(b"for/" + name.encode(), b"3")
            own = await client.get(b"for/" + name.encode())
        assert own is not None
        assert own.value == b"3"
        assert await grpcurl_get(services, name, b"after/kill") == b"2"

    for name in (roles.collector, roles.compactor, *roles.readers, roles.writer):
        assert await services.stop(name) == ExitCode.OK, services[name].report()
        assert not [line for line in services[name].lines() if line.get("level") == "error"]


async def put(services: Composition, writer: str, key: bytes, value: bytes) -> None:
    async with Client(services.address(writer)) as client:
        await client.put(key, value)


async def grpcurl_get(services: Composition, writer: str, key: bytes) -> bytes:
    """Read with a client that knows the API by reflection alone."""
    request = json.dumps({"key": base64.b64encode(key).decode()})
    address = services.address(writer)
    get = services.run("grpcurl", "-plaintext", "-d", request, address, "shalekv.v1.KV/Get")
    assert await get.exited() == 0, get.report()
    return base64.b64decode(json.loads(get.stdout())["value"])
