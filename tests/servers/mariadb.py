"""MariaDB, with a database and a user of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.debian import libraries
from tests.servers.obtain import obtained
from tests.servers.process import Program, ServerFailed, folder, free_port, running

# As mariadb-install-db does it, which needs programs of another package.
BEGIN = b"create database mysql;\nuse mysql;\nset @auth_root_socket=null;\n"
TABLES = "system_tables performance_tables system_tables_data".split()
GRANT = """CREATE DATABASE {name};
CREATE USER '{name}'@'%' IDENTIFIED BY '{password}';
GRANT ALL ON *.* TO '{name}'@'%' WITH GRANT OPTION;
"""
CREATE_S = 60.0


@dataclass(frozen=True, slots=True)
class MariaServer:
    """Where it listens; the user may do everything, creating databases included."""

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
        argv = _argv(usr, work)
        _create(argv, usr, work)
        grant = work / "grant.sql"
        grant.write_text(GRANT.format(name=server.user, password=server.password))
        argv += [f"--init-file={grant}", f"--socket={work / 'socket'}", f"--port={server.port}"]
        argv += ["--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=500"]
        log = work / "log"
        with running(Program(argv, libraries(usr)), log, _greets(server)):
            yield server


def _argv(usr: Path, work: Path) -> list[str]:
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


def _create(argv: list[str], usr: Path, work: Path) -> None:
    share = usr / "share" / "mysql"
    found = [
        next(path for path in (share / f"{kind}_{name}.sql" for kind in ("mariadb", "mysql"))
             if path.exists())
        for name in [*TABLES, "sys_schema"]
    ]  # fmt: skip
    with (work / "tables.sql").open("wb") as script:
        script.write(BEGIN)
        for path in found:
            with path.open("rb") as part:
                shutil.copyfileobj(part, script)
    with (work / "tables.sql").open("rb") as script:
        created = subprocess.run(
            [*argv, "--bootstrap", "--skip-networking"],
            env=os.environ | libraries(usr),
            stdin=script,
            capture_output=True,
            check=False,
            timeout=CREATE_S,
        )
    if created.returncode != 0:
        raise ServerFailed(f"$ {' '.join(argv)}\n{created.stderr.decode(errors='replace')}")


def _greets(server: MariaServer) -> Callable[[], bool]:
    def greets() -> bool:
        try:
            with socket.create_connection((server.host, server.port), timeout=5) as line:
                return b"MariaDB" in line.recv(1024)
        except OSError:
            return False

    return greets
