"""Requests to etcd with TLS, whose files are replaced while one of them waits."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shalekv.cli.process.peers import peer_contexts
from shalekv.server.election.elector import EtcdAddress
from shalekv.server.election.etcd import EtcdClient, EtcdUnavailable
from shalekv.settings import TlsSettings
from tests.kit.certificates import LOCAL, Authority

AUTHORITY = Authority()
NO_KEY = b'{"header": {}}'


class EmptyEtcd:
    """Answers that there is no key; the first request only when it is let go, and by an error."""

    def __init__(self) -> None:
        self.serials: list[str] = []  # of the certificates of clients, in the order of requests
        self.came, self.let_go = threading.Event(), threading.Event()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        connection = handler.connection
        assert isinstance(connection, ssl.SSLSocket)
        certificate = connection.getpeercert() or {}
        self.serials.append(str(certificate["serialNumber"]))
        handler.rfile.read(int(handler.headers["Content-Length"]))
        if len(self.serials) == 1:
            self.came.set()
            self.let_go.wait(10.0)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(NO_KEY)))
        handler.end_headers()
        handler.wfile.write(NO_KEY)

    @contextmanager
    def serving(self, folder: Path) -> Iterator[int]:
        """Serve clients that have certificates of the authority; yields the port."""
        etcd = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                etcd.answer(self)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        files = AUTHORITY.issue(*LOCAL).write(folder, "etcd")
        context = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH, cafile=AUTHORITY.write(folder)
        )
        context.load_cert_chain(files.certificate, files.key)
        context.verify_mode = ssl.CERT_REQUIRED
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            self.let_go.set()
            server.shutdown()
            thread.join()
            server.server_close()


def context_of(folder: Path) -> ssl.SSLContext:
    """The context of a client with a new certificate."""
    files = AUTHORITY.issue(*LOCAL).write(folder, "client")
    settings = TlsSettings(
        tls_cert=files.certificate, tls_key=files.key, tls_server_ca=AUTHORITY.write(folder)
    )
    return peer_contexts(settings).current()


async def test_a_request_that_fails_late_does_not_bring_old_files_back(tmp_path: Path) -> None:
    """It was sent by files that were replaced meanwhile; all later ones go by the new ones."""
    contexts, etcd = [context_of(tmp_path)], EmptyEtcd()
    with etcd.serving(tmp_path) as port:
        client = EtcdClient(
            [EtcdAddress("127.0.0.1", port)], "key", timeout_ms=10_000.0, tls=lambda: contexts[-1]
        )
        late = asyncio.ensure_future(client.holder())
        await asyncio.to_thread(etcd.came.wait)
        contexts.append(context_of(tmp_path))
        assert await client.holder() is None
        etcd.let_go.set()
        with pytest.raises(EtcdUnavailable):
            await late
        assert await client.holder() is None
        await asyncio.to_thread(client.close)
    old, new, last = etcd.serials
    assert (old != new, last) == (True, new)
