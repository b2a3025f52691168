"""Servers of records: etcd of one member, DynamoDB Local, MariaDB and PostgreSQL."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from tests.servers.debian import libraries
from tests.servers.obtain import obtained
from tests.servers.process import (
    Program,
    ServerFailed,
    answers_http,
    folder,
    free_port,
    free_ports,
    running,
)

DYNAMO_MAIN = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"
# The steps of mariadb-install-db, which needs programs of another package.
MARIA_BEGIN = b"create database mysql;\nuse mysql;\nset @auth_root_socket=null;\n"
MARIA_TABLES = "system_tables performance_tables system_tables_data sys_schema".split()
MARIA_GRANT = """CREATE DATABASE {name};
CREATE USER '{name}'@'%' IDENTIFIED BY '{password}';
GRANT ALL ON *.* TO '{name}'@'%' WITH GRANT OPTION;
"""
UNPRIVILEGED = "nobody"
CREATE_S = 60.0


@dataclass(frozen=True, slots=True)
class EtcdServer:
    """Address of a server of etcd, without authentication."""

    address: str  # HOST:PORT

    def delete(self, key: str) -> None:
        body = json.dumps({"key": base64.b64encode(key.encode()).decode()}).encode()
        url = f"http://{self.address}/v3/kv/deleterange"
        with urlopen(Request(url, body, method="POST"), timeout=30):
            pass


@contextmanager
def etcd() -> Iterator[EtcdServer]:
    with folder() as work, etcd_in(work) as server:
        yield server


@contextmanager
def etcd_in(work: Path, **tls: str) -> Iterator[EtcdServer]:
    """One member at its default settings: it syncs, and its reads are linearizable.

    `tls` are the flags of TLS for its clients, if it has that.
    """
    port, peer_port, health_port = free_ports(3)
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    asked = url
    if tls:  # who asks for its health has no certificate
        url, asked = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{health_port}"
    flags = {
        "data-dir": str(work / "data"),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"default={peer_url}",
        "log-level": "error",
    }
    if tls:
        flags["listen-metrics-urls"] = asked
        flags |= {name.replace("_", "-"): value for name, value in tls.items()}
    argv = [str(obtained("etcd") / "program")]
    argv += [f"--{name}={value}" for name, value in flags.items()]
    with running(Program(argv), work / "log", answers_http(f"{asked}/health")):
        yield EtcdServer(f"127.0.0.1:{port}")


@dataclass(frozen=True, slots=True)
class DynamoServer:
    """The URL at which it listens; it takes any access key of letters and digits."""

    endpoint: str
    access_key: str = "shalekv"
    secret_key: str = "shalekv-secret"
    region: str = "us-east-1"


@contextmanager
def dynamodb_local() -> Iterator[DynamoServer]:
    jars = obtained("dynamodb") / "lib"
    with folder() as work:
        port = free_port()
        argv = ["java", f"-Djava.library.path={jars}", "-Xmx512m", "-cp", f"{jars}/*", DYNAMO_MAIN]
        argv += ["-inMemory", "-sharedDb", "-disableTelemetry", "-port", str(port)]
        server = DynamoServer(f"http://127.0.0.1:{port}")
        with running(Program(argv), work / "log", answers_http(server.endpoint)):
            yield server


@dataclass(frozen=True, slots=True)
class MariaServer:
    """The address at which it listens; the user may do everything, and create databases."""

    host: str
    port: int
    user: str = "shalekv"
    password: str = "shalekv"
    database: str = "shalekv"

    def url(self, driver: str = "mysql+asyncmy") -> str:
        return f"{driver}://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"


@contextmanager
def mariadb() -> Iterator[MariaServer]:
    usr = obtained("mariadb") / "usr"
    with folder() as work:
        server = MariaServer("127.0.0.1", free_port())
        argv = _maria_argv(usr, work)
        _create_maria(argv, usr)
        grant = work / "grant.sql"
        grant.write_text(MARIA_GRANT.format(name=server.user, password=server.password))
        argv += [f"--init-file={grant}", f"--socket={work / 'socket'}", f"--port={server.port}"]
        argv += ["--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=500"]
        log = work / "log"
        with running(Program(argv, libraries(usr)), log, _greets(server)):
            yield server


def _maria_argv(usr: Path, work: Path) -> list[str]:
    data = work / "data"
    data.mkdir()
    return [
        str(usr / "sbin" / "mariadbd"),
        "--no-defaults",
        *(["--user=root"] if os.geteuid() == 0 else []),
        f"--basedir={usr}",
        f"--datadir={data}",
        f"--lc-messages-dir={usr / 'share' / 'mysql' / 'english'}",
        f"--tmpdir={work}",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=16M",
        "--innodb-flush-method=nosync",  # the data survives a kill, which is all that happens
        "--debug-no-sync",
    ]


def _create_maria(argv: list[str], usr: Path) -> None:
    share = usr / "share" / "mysql"
    found = [
        next(path for path in (share / f"{kind}_{name}.sql" for kind in ("mariadb", "mysql"))
             if path.exists())
        for name in MARIA_TABLES
    ]  # fmt: skip
    script = MARIA_BEGIN + b"".join(path.read_bytes() for path in found)
    _run([*argv, "--bootstrap", "--skip-networking"], libraries(usr), script=script)


def _run(
    argv: list[str], env: Mapping[str, str], *, user: str | None = None, script: bytes = b""
) -> None:
    """A program that makes the files of a server, to its end."""
    ran = subprocess.run(
        argv,
        env=os.environ | env,
        cwd="/",
        user=user,
        extra_groups=None if user is None else [],
        input=script,
        capture_output=True,
        check=False,
        timeout=CREATE_S,
    )
    if ran.returncode != 0:
        said = (ran.stdout + ran.stderr).decode(errors="replace")
        raise ServerFailed(f"$ {' '.join(argv)}\n{said}")


def _greets(server: MariaServer) -> Callable[[], bool]:
    def greets() -> bool:
        try:
            with socket.create_connection((server.host, server.port), timeout=5) as line:
                return b"MariaDB" in line.recv(1024)
        except OSError:
            return False

    return greets


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """The address at which it listens; the user may do everything, and needs no password."""

    host: str
    port: int
    user: str = "shalekv"
    password: str = "shalekv"
    database: str = "postgres"

    def url(self, driver: str = "postgresql+asyncpg") -> str:
        return f"{driver}://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """Run PostgreSQL, as `nobody` if the user is root, which it refuses."""
    usr = obtained("postgres") / "usr"
    programs = max(usr.glob("lib/postgresql/*/bin"), default=usr / "bin")
    env = libraries(usr) | {"LC_ALL": "C"}
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    with folder() as work:
        if user is not None:
            shutil.chown(work, user)
        server = PostgresServer("127.0.0.1", free_port())
        data = work / "data"
        argv = [f"--pgdata={data}", f"--username={server.user}", "--auth=trust", "--no-sync"]
        argv = [str(programs / "initdb"), *argv, "--no-locale", "--encoding=UTF8"]
        _run(argv, env, user=user)
        argv = [str(programs / "postgres"), "-D", str(data), "-p", str(server.port), "-h"]
        argv += [server.host, "-k", "", "-c", "max_connections=200", "-c", "fsync=off"]
        answers = _answers(programs, server, env)
        # It ends its sessions on SIGINT; on SIGTERM it would wait for them.
        program = Program(argv, env, user=user, ending=signal.SIGINT)
        with running(program, work / "log", answers):
            yield server


def _answers(programs: Path, server: PostgresServer, env: dict[str, str]) -> Callable[[], bool]:
    argv = [str(programs / "pg_isready"), "-q", "-h", server.host, "-p", str(server.port)]

    def answers() -> bool:
        return subprocess.run(argv, env=os.environ | env, check=False).returncode == 0

    return answers
