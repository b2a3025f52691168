"""Servers of objects: versitygw, MinIO, moto, s3rver, Azurite, and fake-gcs-server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.request import Request, urlopen

from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_port, running
from tests.servers.s3 import S3Server

ROOT = Path(__file__).parents[2]
PORT = re.compile(r"^listens on (\d+)$", re.MULTILINE)
S3RVER_CREDENTIAL = "S3RVER"  # its only credential
AZURE_ACCOUNT = "devstoreaccount1"  # Azurite's documentation publishes it with its key
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
AZURE_VERSION = "2021-12-02"


@contextmanager
def versitygw() -> Iterator[S3Server]:
    """S3 over a folder. It keeps its promises: conditions hold, signatures are checked."""
    program = obtained("versitygw") / "bin" / "versitygw"
    with folder() as work:
        port = free_port()
        server = S3Server(f"http://127.0.0.1:{port}")
        argv = [str(program), "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet"]
        env = {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}
        argv += ["posix", *_metadata(work), str(_made(work / "data"))]
        with running(Program(argv, env), work / "log", answers_http(server.endpoint)):
            yield server


@contextmanager
def minio() -> Iterator[S3Server]:
    """S3 over a folder, by the server that many have. It is built when it is first asked for."""
    program = obtained("minio") / "bin" / "minio"
    with folder() as work:
        port = free_port()
        server = S3Server(f"http://127.0.0.1:{port}")
        argv = [str(program), "server", "--address", f"127.0.0.1:{port}", str(_made(work / "data"))]
        env = {"MINIO_ROOT_USER": server.access_key, "MINIO_ROOT_PASSWORD": server.secret_key}
        env |= {"MINIO_SITE_REGION": server.region, "HOME": str(work)}
        env |= {"MINIO_BROWSER": "off", "MINIO_UPDATE": "off"}
        ready = answers_http(f"{server.endpoint}/minio/health/cluster")
        with running(Program(argv, env), work / "log", ready):
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


@contextmanager
def s3rver() -> Iterator[S3Server]:
    """S3 over a folder. It ignores conditions: a program that needs them must refuse it."""
    program = obtained("npm") / "node_modules" / "s3rver" / "bin" / "s3rver.js"
    with folder() as work:
        port = free_port()
        server = S3Server(f"http://127.0.0.1:{port}", S3RVER_CREDENTIAL, S3RVER_CREDENTIAL)
        argv = ["node", str(program), "--directory", str(work), "--address", "127.0.0.1"]
        argv += ["--port", str(port), "--silent"]
        with running(Program(argv), work / "log", answers_http(server.endpoint)):
            yield server


@contextmanager
def moto() -> Iterator[S3Server]:
    """S3 and DynamoDB in memory. It checks no signatures, and no checksums of what it is sent."""
    with folder() as work, _printing_its_port(work / "log", "moto_program") as endpoint:
        yield S3Server(endpoint)


@contextmanager
def _printing_its_port(log: Path, module: str, *argv: str) -> Iterator[str]:
    """Run a program of this folder; the result is the URL at which it listens."""
    started = [sys.executable, "-m", f"tests.servers.{module}", *argv]
    program = Program(started, {"PYTHONPATH": str(ROOT)})
    with running(program, log, lambda: PORT.search(log.read_text()) is not None):
        found = PORT.search(log.read_text())
        assert found is not None
        yield f"http://127.0.0.1:{found[1]}"


@dataclass(frozen=True, slots=True)
class AzureServer:
    """The URL at which it listens, with the account's name, and the key of that account."""

    endpoint: str
    account: str = AZURE_ACCOUNT
    key: str = AZURE_KEY

    def create_container(self, name: str) -> None:
        dated = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_VERSION}
        resource = f"/{self.account}/{self.account}/{name}\nrestype:container"
        text = "\n".join(
            ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in dated.items()), resource]
        )
        digest = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        signature = base64.b64encode(digest).decode()
        headers = dated | {"authorization": f"SharedKey {self.account}:{signature}"}
        url = f"{self.endpoint}/{name}?restype=container"
        with urlopen(Request(url, None, headers, method="PUT"), timeout=30):  # noqa: S310 - it is http://127.0.0.1
            pass


@contextmanager
def azurite() -> Iterator[AzureServer]:
    """Azure's blobs, in memory."""
    program = obtained("npm") / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    with folder() as work:
        port = free_port()
        argv = ["node", str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
        argv += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        server = AzureServer(f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}")
        with running(Program(argv), work / "log", answers_http(server.endpoint)):
            yield server


@dataclass(frozen=True, slots=True)
class GoogleServer:
    """The URLs at which it listens. It asks for no credentials."""

    endpoint: str
    json_endpoint: str  # of fake-gcs-server itself

    def create_bucket(self, name: str) -> None:
        body = json.dumps({"name": name}).encode()
        url = f"{self.json_endpoint}/storage/v1/b?project=shalekv"
        with urlopen(Request(url, body, {"content-type": "application/json"}), timeout=30):  # noqa: S310 - it is http://127.0.0.1
            pass


@contextmanager
def google() -> Iterator[GoogleServer]:
    """fake-gcs-server in memory, behind a front that speaks the XML it lacks."""
    program = obtained("google") / "bin" / "fake-gcs-server"
    with folder() as work:
        port = free_port()
        inner = f"http://127.0.0.1:{port}"
        argv = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        argv += ["-backend", "memory", "-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
        with (
            running(Program(argv), work / "log", answers_http(f"{inner}/storage/v1/b?project=x")),
            _printing_its_port(work / "front.log", "google_program", inner) as endpoint,
        ):
            yield GoogleServer(endpoint, inner)
