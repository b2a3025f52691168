"""Azurite: Azure's blobs, in memory."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from urllib.request import Request, urlopen

from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_port, running

ACCOUNT = "devstoreaccount1"  # Azurite's documentation publishes it with its key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
API_VERSION = "2021-12-02"


@dataclass(frozen=True, slots=True)
class AzureServer:
    """Where it listens, the account's name included, and the key of that account."""

    endpoint: str
    account: str = ACCOUNT
    key: str = KEY

    def create_container(self, name: str) -> None:
        dated = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": API_VERSION}
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
    program = obtained("npm") / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    with folder() as work:
        port = free_port()
        argv = ["node", str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
        argv += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        server = AzureServer(f"http://127.0.0.1:{port}/{ACCOUNT}")
        with running(Program(argv), work / "log", answers_http(server.endpoint)):
            yield server
