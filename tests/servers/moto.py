"""moto: S3 and DynamoDB in memory. It checks no signatures, and no checksums of what it is sent."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import Program, folder, running
from tests.servers.s3 import S3Server

ROOT = Path(__file__).parents[2]
PORT = re.compile(r"^listens on (\d+)$", re.MULTILINE)


@contextmanager
def moto() -> Iterator[S3Server]:
    """The server, empty; its endpoint serves DynamoDB as well."""
    with folder() as work:
        log = work / "log"
        program = Program(
            [sys.executable, "-m", "tests.servers.moto_program"], {"PYTHONPATH": str(ROOT)}
        )
        with running(program, log, lambda: PORT.search(log.read_text()) is not None):
            found = PORT.search(log.read_text())
            assert found is not None
            yield S3Server(f"http://127.0.0.1:{found[1]}")
