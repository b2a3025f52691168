"""etcd, of one member, with nothing in it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import Request, urlopen

from tests.servers.debian import libraries
from tests.servers.obtain import obtained
from tests.servers.process import Program, answers_http, folder, free_ports, running


@dataclass(frozen=True, slots=True)
class EtcdServer:
    """Where it listens; nobody is asked who they are."""

    address: str  # HOST:PORT

    def delete(self, key: str) -> None:
        body = json.dumps({"key": base64.b64encode(key.encode()).decode()}).encode()
        url = f"http://{self.address}/v3/kv/deleterange"
        with urlopen(Request(url, body, method="POST"), timeout=30):
            pass


@contextmanager
def etcd() -> Iterator[EtcdServer]:
    usr = obtained("etcd") / "usr"
    with folder() as work:
        port, peer_port = free_ports(2)
        url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        flags = {
            "data-dir": str(work / "data"),
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"default={peer_url}",
        }
        argv = [str(usr / "bin" / "etcd"), *(f"--{name}={value}" for name, value in flags.items())]
        program = Program(argv, libraries(usr))
        with running(program, work / "log", answers_http(f"{url}/health")):
            yield EtcdServer(f"127.0.0.1:{port}")
