"""versitygw: S3 over a folder. It keeps its promises: conditions hold, signatures are checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_port, running
from tests.servers.s3 import S3Server


@contextmanager
def versitygw() -> Iterator[S3Server]:
    program = obtained("versitygw") / "bin" / "versitygw"
    with folder() as work:
        port = free_port()
        server = S3Server(f"http://127.0.0.1:{port}")
        argv = [str(program), "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet"]
        env = {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}
        posix = ["posix", *_metadata(work), str(_made(work / "data"))]
        log = work / "log"
        with running(Program([*argv, *posix], env), log, answers_http(server.endpoint)):
            yield server


def _metadata(work: Path) -> list[str]:
    """Metadata is kept in extended attributes, and where there are none beside the files."""
    try:
        os.setxattr(work, "user.shalekv", b"")
    except OSError:
        return ["--sidecar", str(_made(work / "metadata"))]
    return []


def _made(path: Path) -> Path:
    path.mkdir()
    return path
