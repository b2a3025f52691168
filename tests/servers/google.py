"""Google's storage: fake-gcs-server in memory, behind a front that speaks the XML it lacks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_port, running

ROOT = Path(__file__).parents[2]
PORT = re.compile(r"^listens on (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GoogleServer:
    """Where it listens. It asks for no credentials."""

    endpoint: str
    json_endpoint: str  # of fake-gcs-server itself

    def create_bucket(self, name: str) -> None:
        body = json.dumps({"name": name}).encode()
        url = f"{self.json_endpoint}/storage/v1/b?project=shalekv"
        with urlopen(Request(url, body, {"content-type": "application/json"}), timeout=30):  # noqa: S310 - it is http://127.0.0.1
            pass


@contextmanager
def google() -> Iterator[GoogleServer]:
    program = obtained("google") / "bin" / "fake-gcs-server"
    with folder() as work:
        port = free_port()
        inner = f"http://127.0.0.1:{port}"
        argv = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        argv += ["-backend", "memory", "-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
        front = Program(
            [sys.executable, "-m", "tests.servers.google_program", inner],
            {"PYTHONPATH": str(ROOT)},
        )
        log = work / "front.log"
        with (
            running(Program(argv), work / "log", answers_http(f"{inner}/storage/v1/b?project=x")),
            running(front, log, lambda: PORT.search(log.read_text()) is not None),
        ):
            found = PORT.search(log.read_text())
            assert found is not None
            yield GoogleServer(f"http://127.0.0.1:{found[1]}", inner)
