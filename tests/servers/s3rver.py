"""s3rver: S3 over a folder. It ignores conditions: whoever relies on them must refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_port, running
from tests.servers.s3 import S3Server

CREDENTIAL = "S3RVER"  # the only one that it knows


@contextmanager
def s3rver() -> Iterator[S3Server]:
    program = obtained("npm") / "node_modules" / "s3rver" / "bin" / "s3rver.js"
    with folder() as work:
        port = free_port()
        server = S3Server(f"http://127.0.0.1:{port}", CREDENTIAL, CREDENTIAL)
        argv = ["node", str(program), "--directory", str(work), "--address", "127.0.0.1"]
        argv += ["--port", str(port), "--silent"]
        with running(Program(argv), work / "log", answers_http(server.endpoint)):
            yield server
