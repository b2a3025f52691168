"""DynamoDB Local: Amazon's own, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_port, running

MAIN = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"


@dataclass(frozen=True, slots=True)
class DynamoServer:
    """Where it listens; it takes any credentials whose access key is letters and digits."""

    endpoint: str
    access_key: str = "shalekv"
    secret_key: str = "shalekv-secret"
    region: str = "us-east-1"


@contextmanager
def dynamodb_local() -> Iterator[DynamoServer]:
    jars = obtained("dynamodb") / "lib"
    with folder() as work:
        port = free_port()
        argv = ["java", f"-Djava.library.path={jars}", "-Xmx512m", "-cp", f"{jars}/*", MAIN]
        argv += ["-inMemory", "-sharedDb", "-disableTelemetry", "-port", str(port)]
        server = DynamoServer(f"http://127.0.0.1:{port}")
        with running(Program(argv), work / "log", answers_http(server.endpoint)):
            yield server
