"""PostgreSQL, with a database and a user of its own. It refuses root, and then runs as `nobody`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.debian import libraries
from tests.servers.obtain import obtained
from tests.servers.process import Program, ServerFailed, folder, free_port, running

UNPRIVILEGED = "nobody"
CREATE_S = 60.0


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """Where it listens; the user may do everything, and no password is asked for."""

    host: str
    port: int
    user: str = "shalekv"
    password: str = "shalekv"
    database: str = "postgres"

    def url(self, driver: str = "postgresql+asyncpg") -> str:
        return f"{driver}://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"


@contextmanager
def postgres() -> Iterator[PostgresServer]:
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
        _create([str(programs / "initdb"), *argv, "--no-locale", "--encoding=UTF8"], env, user)
        argv = [str(programs / "postgres"), "-D", str(data), "-p", str(server.port), "-h"]
        argv += [server.host, "-k", "", "-c", "max_connections=200", "-c", "fsync=off"]
        answers = _answers(programs, server, env)
        # It ends its sessions on SIGINT; on SIGTERM it would wait for them.
        program = Program(argv, env, user=user, ending=signal.SIGINT)
        with running(program, work / "log", answers):
            yield server


def _create(argv: list[str], env: dict[str, str], user: str | None) -> None:
    created = subprocess.run(
        argv,
        env=os.environ | env,
        cwd="/",
        user=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
        check=False,
        timeout=CREATE_S,
    )
    if created.returncode != 0:
        raise ServerFailed(f"$ {' '.join(argv)}\n{created.stdout}{created.stderr}")


def _answers(programs: Path, server: PostgresServer, env: dict[str, str]) -> Callable[[], bool]:
    argv = [str(programs / "pg_isready"), "-q", "-h", server.host, "-p", str(server.port)]

    def answers() -> bool:
        return subprocess.run(argv, env=os.environ | env, check=False).returncode == 0

    return answers
