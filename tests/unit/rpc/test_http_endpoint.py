"""The HTTP endpoint: who may read metrics, when a process is ready, and what strangers can do."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, TCPConnector
from structlog.testing import capture_logs

from shalekv.errors import StandingBy
from shalekv.protocol.access import Policy, Principal, Verb
from shalekv.rpc.http_endpoint import (
    CONNECTIONS_MAX,
    HEADER_BYTES_MAX,
    SCRAPES_MAX,
    HttpEndpoint,
)
from shalekv.rpc.native_server import accepted
from shalekv.rpc.server import Server
from shalekv.server.access.guard import Guard
from shalekv.server.access.identity import Credentials, Identity
from shalekv.server.readiness import Readiness
from shalekv.settings.security import TlsSettings
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.sources import MetricSources
from shalekv.wording import Trouble
from tests.kit.certificates import LOCAL, Authority
from tests.kit.constants import constants
from tests.kit.serving.guarded import BEARER, HeldPolicy, KnownTokens, policy_of, prefix
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv, MemoryWatches
from tests.kit.serving.rpc import runtime, server_settings

CA, OTHER = Authority(), Authority("another")
OPEN = "application/openmetrics-text; version=1.0.0"


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to a request."""

    status: int
    text: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Asking:
    """An endpoint that runs, a server that says whether it is ready, and requests to them."""

    endpoint: HttpEndpoint
    server: Server

    async def ask(
        self,
        path: str,
        method: str = "GET",
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Answer:
        url = self.endpoint.url.replace("/metrics", path).replace("127.0.0.1", "localhost")
        connector = TCPConnector(ssl=True if tls is None else tls)
        async with (
            ClientSession(connector=connector) as session,
            session.request(method, url, headers=headers) as reply,
        ):
            return Answer(reply.status, await reply.text(), reply.headers)

    async def start(self, readiness: Readiness) -> None:
        await self.server.start(MemoryKv(), MemoryAdmin(), MemoryWatches(), readiness)


def some(metrics: Metrics) -> None:
    """A source of a few samples."""
    metrics.add("commits", 7)
    metrics.add("prefix_calls", 1, "users/")
    metrics.add("principal_calls", 1, "token:root")
    metrics.add("slowest_store_request_seconds", 1, "writer", "get", "wal", "wal/1")


@asynccontextmanager
async def endpoint(
    *,
    sources: MetricSources | None = None,
    tls: TlsSettings | None = None,
    guard: Guard | None = None,
    open_services: bool = True,
) -> AsyncIterator[Asking]:
    """An endpoint beside a server that does not serve yet."""
    if sources is None:
        sources = MetricSources()
        sources.add(some)
    it = HttpEndpoint("127.0.0.1:0", sources, tls=tls, guard=guard, open_services=open_services)
    server = Server(server_settings(), runtime())
    running = asyncio.create_task(it.run(server.problem))
    try:
        yield Asking(it, server)
    finally:
        running.cancel()
        await asyncio.wait([running])
        it.close()
        await server.stop()


def guarded(policy: Policy) -> Guard:
    return Guard(KnownTokens("root", "reader", "stranger"), HeldPolicy(policy))


class Seen:
    """Knows each certificate, and remembers it."""

    def __init__(self) -> None:
        self.certificates: list[bytes] = []

    def identify(self, credentials: Credentials) -> Identity:
        self.certificates.append(credentials.certificate)
        return Identity(Principal("uri:spiffe://example.org/prometheus"))

    def is_valid(self, _: Identity) -> bool:
        return True


async def test_formats() -> None:
    """Metrics are OpenMetrics for those who ask for it, and else the text of Prometheus."""
    async with endpoint() as it:
        plain, modern = await it.ask("/metrics"), await it.ask("/metrics", Accept=OPEN)
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "shalekv_commits_total 7.0\n" in plain.text
    assert modern.headers["Content-Type"] == OPEN + "; charset=utf-8"
    assert modern.text.endswith("# EOF\n")
    assert "shalekv_commits_total 7.0\n" in modern.text


async def test_other_requests() -> None:
    """Other paths, methods and roles are refused with a text that says what there is."""
    async with endpoint() as it:
        assert (await it.ask("/")).status == 404
        posted = await it.ask("/metrics", "POST")
        assert (posted.status, posted.headers["Allow"]) == (405, "GET, HEAD")
        head = await it.ask("/metrics", "HEAD")
        assert (head.status, head.text) == (200, "")
        role = await it.ask("/readyz?role=leader")
        assert (role.status, role.text) == (400, "role: is `reader`, `writer`, or left out\n")


NO_HTTP = (
    b"\x00\x01\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nX: " + b"a" * HEADER_BYTES_MAX + b"\r\n\r\n",
    b"GET /livez HTTP/1.0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
    b"GET http://a:99999999/metrics HTTP/1.1\r\nHost: a\r\n\r\n",
)


@pytest.mark.parametrize("sent", NO_HTTP)
async def test_what_is_no_request_leaves_no_trace(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused once, without what this server is made of, and strangers fill no log."""
    async with endpoint() as it:
        host, _, port = it.endpoint.listen.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    assert head.startswith("HTTP/1.0 400 Bad Request\r\n")
    assert "Server: shalekv" in head
    assert text == "this port answers GET and HEAD of HTTP/1.1\n"
    assert not caplog.records


async def test_formats_that_nobody_knows() -> None:
    """Who asks for a version that is no number gets the text of Prometheus."""
    async with endpoint() as it:
        odd = await it.ask("/metrics", Accept="application/openmetrics-text; version=x")
    assert (odd.status, odd.headers["Content-Type"][:10]) == (200, "text/plain")


async def test_readiness_is_that_of_the_health_checks() -> None:
    """A process is live from the beginning, and ready as its health checks say, with the cause."""
    trouble = Trouble("store unreachable", "s3://secret/place does not answer", 0.0)
    async with endpoint() as it:

        async def ready(role: str = "") -> tuple[int, str]:
            answer = await it.ask(f"/readyz{role}")
            return answer.status, answer.text

        opening = "this process does not serve yet: it opens its database, or its logs\n"
        assert await ready() == (503, opening)
        await it.start(Readiness())
        assert await ready() == (200, "ok\n")
        assert await ready("?role=writer") == (200, "ok\n")
        it.server.report(Readiness(writes=trouble))
        assert await ready() == (503, "writes fail: store unreachable\n")
        assert await ready("?role=writer") == (503, "writes fail: store unreachable\n")
        assert await ready("?role=reader") == (200, "ok\n")
        it.server.report(Readiness(takes_writes=False))
        assert await ready() == (200, "ok\n")
        assert (await ready("?role=writer"))[0] == 503
        await it.server.stand_by(StandingBy("on standby: nothing was applied", writer_address=""))
        assert await ready() == (503, "on standby\n")
        it.server.set_refusal(StandingBy("x is elected", writer_address="x"))
        assert await ready("?role=reader") == (503, "x is elected\n")
        assert (await it.ask("/livez")).text == "ok\n"


async def test_callers_need_to_be_allowed_anything_at_all() -> None:
    """Metrics are for those who may call at all; who and what there is, for administrators."""
    policy = policy_of(reader=prefix(b"a", Verb.READ))
    async with endpoint(guard=guarded(policy)) as it:
        nobody = await it.ask("/metrics")
        assert (nobody.status, nobody.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await it.ask("/metrics", Authorization=BEARER + "forged")).status == 401
        assert (await it.ask("/metrics", Authorization=BEARER + "stranger")).status == 403
        reader = await it.ask("/metrics", Authorization=BEARER + "reader")
        root = await it.ask("/metrics", Authorization=BEARER + "root")
        assert (await it.ask("/livez")).status == 200
        it.endpoint.collect(refused := Metrics())
    assert refused.get("refusals", "UNAUTHENTICATED") == 2
    assert refused.get("refusals", "PERMISSION_DENIED") == 1
    assert "shalekv_commits_total" in reader.text
    assert "commits_total" in root.text
    for secret in ("users/", "token:root", "wal/1"):
        assert secret in root.text
        assert secret not in reader.text


async def test_probes_may_need_credentials() -> None:
    """Without open services, probes are for callers that are allowed anything."""
    async with endpoint(guard=guarded(policy_of()), open_services=False) as it:
        assert (await it.ask("/livez")).status == 401
        assert (await it.ask("/readyz")).status == 401
        assert (await it.ask("/livez", Authorization=BEARER + "root")).status == 200


async def test_nothing_is_shown_before_the_policy_is_known() -> None:
    """A process that has not read the policy shows metrics to nobody, but that it lives."""
    policy = HeldPolicy(Policy())
    policy.is_known = False
    guard = Guard(KnownTokens("root"), policy)
    async with endpoint(guard=guard, open_services=False) as it:
        assert (await it.ask("/livez")).status == 200
        assert (await it.ask("/readyz")).status == 503
        assert (await it.ask("/metrics")).status == 503
        policy.is_known = True
        assert (await it.ask("/metrics")).status == 200


async def test_renewed_files_and_certificates_of_clients(tmp_path: Path) -> None:
    """TLS is that of the gRPC port: clients show certificates, and renewed files count at once."""
    server = CA.issue(*LOCAL).write(tmp_path, "server")
    certificate = CA.issue(uris=["spiffe://example.org/prometheus"])
    client = certificate.write(tmp_path, "client")
    settings = TlsSettings(
        tls_cert=server.certificate, tls_key=server.key, tls_client_ca=CA.write(tmp_path)
    )
    seen = Seen()
    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 0}):
        async with endpoint(tls=settings, guard=Guard(seen, HeldPolicy(Policy()))) as it:
            tls = ssl.create_default_context(cafile=CA.write(tmp_path))
            with pytest.raises(ClientError):
                await it.ask("/metrics", tls=tls)
            tls.load_cert_chain(client.certificate, client.key)
            tls.set_alpn_protocols(["h2", "http/1.1"])
            assert (await it.ask("/metrics", tls=tls)).status == 200
            OTHER.issue(*LOCAL).write(tmp_path, "server")
            with pytest.raises(ssl.SSLCertVerificationError):
                await it.ask("/metrics", tls=tls)
            tls.load_verify_locations(OTHER.write(tmp_path, "other"))
            assert (await it.ask("/metrics", tls=tls)).status == 200
    assert seen.certificates == [certificate.der]


async def test_tokens_over_tls(tmp_path: Path) -> None:
    """With TLS and tokens, a token decides within TLS, and without TLS nothing is answered."""
    server = CA.issue(*LOCAL).write(tmp_path, "server")
    settings = TlsSettings(tls_cert=server.certificate, tls_key=server.key)
    policy = policy_of(reader=prefix(b"a", Verb.READ))
    tls = ssl.create_default_context(cafile=CA.write(tmp_path))
    async with endpoint(tls=settings, guard=guarded(policy)) as it:
        codes = {
            name: (await it.ask("/metrics", tls=tls, Authorization=BEARER + name)).status
            for name in ("forged", "stranger", "reader")
        }
        assert codes == {"forged": 401, "stranger": 403, "reader": 200}
        assert (await it.ask("/metrics", tls=tls)).status == 401
        assert (await it.ask("/livez", tls=tls)).status == 200
        reader, writer = await asyncio.open_connection(*it.endpoint.listen.rsplit(":", 1))
        writer.write(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer reader\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()


async def test_connections_wait_while_too_many_files_are_open() -> None:
    """It is logged, and they are accepted as soon as there are files again."""
    often = {"shalekv.rpc.native_server:ACCEPT_PAUSE_S": 0}
    with (
        constants(often),
        capture_logs() as logs,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        accepting = asyncio.create_task(accepted(listener))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            while not (logs or accepting.done()):  # noqa: ASYNC110 - seen from outside alone
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with await accepting as connection:
            assert connection.getpeername() == client.getsockname()
    assert {line["event"] for line in logs} == {"connections cannot be accepted"}


async def test_connections_that_are_silent_give_way() -> None:
    """However many connections say nothing, or half a request, a scrape is answered."""
    async with endpoint() as it:
        host, _, port = it.endpoint.listen.rpartition(":")
        silent = [
            await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS_MAX + 10)
        ]
        silent[-1][1].write(b"GET /metrics HTTP/1.1\r\n")
        assert (await it.ask("/metrics")).status == 200
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


async def test_scrapes_are_few_at_once() -> None:
    """A scrape beyond those that may be in progress is told to come later."""
    released, sources = asyncio.Event(), MetricSources()
    begun = asyncio.Semaphore(0)

    async def slow(_: Metrics) -> None:
        begun.release()
        await released.wait()

    sources.add(slow)
    async with endpoint(sources=sources) as it:
        scrapes = [asyncio.create_task(it.ask("/metrics")) for _ in range(SCRAPES_MAX)]
        for _ in scrapes:
            await begun.acquire()
        assert (await it.ask("/metrics")).status == 429
        released.set()
        assert {answer.status for answer in await asyncio.gather(*scrapes)} == {200}


async def test_connections_end_in_time() -> None:
    """A connection that sends no request is closed after a while."""
    with constants({"shalekv.rpc.http_endpoint:CONNECTION_S": 0.05}):
        async with endpoint() as it:
            host, _, port = it.endpoint.listen.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b""
            writer.close()
