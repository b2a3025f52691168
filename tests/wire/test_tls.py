"""TLS of the wire over real sockets: what is negotiated, and what each side says of failures."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.connection import CONNECTION_WINDOW
from shalekv_wire.frames import DEFAULT_WINDOW, PREFACE, settings_frame, window_update
from shalekv_wire.server import ServerOptions
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.tls import ALPN, TlsContexts, TlsFiles
from tests.kit.certificates import LOCAL, Authority, Pair, greet
from tests.kit.constants import constants
from tests.kit.timeouts import until
from tests.wire.serving import ECHO, FLOOD, LATER, Serving, channel, serving

CA, OTHER = Authority(), Authority("another")
SERVER = CA.issue(*LOCAL)
CLIENT = CA.issue(uris=["spiffe://example.org/client"])
EXPIRED = CA.issue(uris=["spiffe://example.org/client"], valid=(-3, -1))
STRANGER = OTHER.issue(uris=["spiffe://example.org/client"])
GREETED = window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW)  # the last that a server sends first
HALF_HELLO = bytes.fromhex("1603010200010001fc0303") + b"\0" * 100
STRANGERS = 50


@pytest.fixture(autouse=True)
def looking_at_once() -> Iterator[None]:
    """Look at the files for each connection, not once a second."""
    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 0}):
        yield


def server_files(folder: Path, pair: Pair = SERVER, *, asks: bool = True) -> TlsFiles:
    """The files of a server, which asks clients for certificates or does not."""
    files = pair.write(folder, "server")
    return replace(files, authority=CA.write(folder)) if asks else files


def options(folder: Path, **more: object) -> ServerOptions:
    """Options of a server that asks clients for certificates."""
    return replace(
        ServerOptions(tls=TlsContexts(server_files(folder), is_server=True)),
        **more,  # type: ignore[arg-type]
    )


def client(folder: Path, pair: Pair | None = CLIENT, authority: Authority = CA) -> ChannelOptions:
    """Options of a client."""
    files = TlsFiles() if pair is None else pair.write(folder, "client")
    files = replace(files, authority=authority.write(folder, "ca of the server"))
    return ChannelOptions(tls=TlsContexts(files, is_server=False))


async def refusal(address: str, how: ChannelOptions | None) -> str:
    """Return the error of a call, which was not sent for certain."""
    async with channel(address, how) as it:
        with pytest.raises(CallFailed) as caught:
            await it.unary(ECHO, b"")
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert caught.value.is_unsent
    return caught.value.message


# --- negotiation


async def openssl(
    address: str, *flags: str, text: bytes = b"", after: bytes = b""
) -> tuple[int, str]:
    """Connect by `openssl s_client`; returns its exit code and what it says.

    It gets `text` when it has said `after`, and the end of its input then.
    """
    command = ["openssl", "s_client", "-connect", address, *flags]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    said = b""
    while after not in said and (piece := await process.stdout.read(65_536)):
        said += piece
    output, _ = await process.communicate(text)
    assert process.returncode is not None
    return process.returncode, (said + output).decode("latin-1")


WEAK = ("-cipher", "ALL:@SECLEVEL=0")


@pytest.mark.parametrize(
    ("flags", "negotiated"),
    [
        (("-tls1", *WEAK), ""),
        (("-tls1_1", *WEAK), ""),
        (("-tls1_2",), "TLSv1.2"),
        (("-tls1_3",), "TLSv1.3"),
        (("-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256"), "TLSv1.2"),
        (("-tls1_2", "-cipher", "ECDHE-ECDSA-CHACHA20-POLY1305"), "TLSv1.2"),
        (("-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA"), ""),
        (("-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-CCM"), ""),
        (("-tls1_2", "-cipher", "aNULL:@SECLEVEL=0"), ""),
        (("-tls1_2", "-cipher", "AES128-GCM-SHA256"), ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
async def test_versions_and_ciphers(
    tmp_path: Path, flags: tuple[str, ...], negotiated: str
) -> None:
    """TLS 1.2 with forward secrecy and authenticated encryption, and TLS 1.3: nothing else."""
    files = server_files(tmp_path, asks=False)
    async with serving(ServerOptions(tls=TlsContexts(files, is_server=True))) as it:
        code, said = await openssl(it.address, *flags, "-alpn", ALPN)
    if negotiated:
        assert code == 0
        assert f"New, {negotiated}, Cipher is" in said
        assert f"ALPN protocol: {ALPN}" in said
        assert "Compression: NONE" in said
    else:
        assert "Cipher is (NONE)" in said


async def test_client_asks_for_no_new_handshake(tmp_path: Path) -> None:
    """A client of TLS 1.2 that wants to renegotiate gets none.

    It asks when it has the greeting, which it does not expect during a handshake.
    """
    files = server_files(tmp_path, asks=False)
    flags = ("-tls1_2", "-alpn", ALPN)
    async with serving(ServerOptions(tls=TlsContexts(files, is_server=True))) as it:
        _, said = await openssl(it.address, *flags, text=b"R\n", after=GREETED)
    assert "RENEGOTIATING" in said
    assert "no renegotiation" in said


async def test_client_that_sends_new_keys_without_end_is_disconnected(tmp_path: Path) -> None:
    """Records that bring nothing cost their sender the connection."""
    files = server_files(tmp_path, asks=False)
    pipe = asyncio.subprocess.PIPE
    with constants({"shalekv_wire.tls_transport:USELESS_BYTES_MAX": 1_000}):
        async with serving(ServerOptions(tls=TlsContexts(files, is_server=True))) as it:
            process = await asyncio.create_subprocess_exec(
                *("openssl", "s_client", "-connect", it.address, "-alpn", ALPN),
                stdin=pipe,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=pipe,
            )
            assert process.stdin is not None
            assert process.stderr is not None
            updates = 0
            with suppress(ConnectionError):
                while True:
                    process.stdin.write(b"K\n")
                    while b"KEYUPDATE" not in (line := await process.stderr.readline()) and line:
                        pass
                    if not line:
                        break
                    updates += 1
            await process.communicate()
    assert 20 < updates < 100


@pytest.mark.parametrize("flags", [(), ("-alpn", "http/1.1")], ids=["none", "http/1.1"])
async def test_another_protocol_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: tuple[str, ...]
) -> None:
    """A client that does not choose HTTP/2 by ALPN is disconnected, and the log says so."""
    caplog.set_level("DEBUG", "shalekv_wire")
    files = server_files(tmp_path, asks=False)
    async with serving(ServerOptions(tls=TlsContexts(files, is_server=True))) as it:
        _, said = await openssl(it.address, *flags)
        await until(lambda: not it.server.connections, "the end of the connection")
    assert "No ALPN negotiated" in said
    assert "the client does not choose HTTP/2 by ALPN" in caplog.text


# --- certificates


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_calls_over_tls(tmp_path: Path, run: object) -> None:
    """Calls of any size and shape are answered, on both event loops."""

    async def call_both() -> None:
        how = client(tmp_path)
        async with serving(options(tmp_path)) as it, channel(it.address, how) as calls:
            for size in (0, 1, 16_384, 3_000_000):
                assert await calls.unary(ECHO, b"x" * size) == b"x" * size
            stream = calls.stream(FLOOD)
            assert len(await stream.read() or b"") > 0
            stream.cancel()

    run(call_both())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (None, "the server wants a certificate, and got none"),
        (STRANGER, "the server does not know the authority of the certificate"),
        (EXPIRED, "the server refuses the certificate: it has expired"),
    ],
    ids=["none", "stranger", "expired"],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_client_is_told_that_its_certificate_was_refused(
    tmp_path: Path, pair: Pair | None, said: str, version: ssl.TLSVersion
) -> None:
    """Clients of TLS 1.3 learn it after their handshake; their calls were not sent all the same."""
    how = client(tmp_path, pair)
    assert how.tls is not None
    how.tls.current().maximum_version = version
    async with serving(options(tmp_path)) as it:
        found = await refusal(it.address, how)
    if pair is None and version is ssl.TLSVersion.TLSv1_2:
        said = "the server refuses the handshake: it may want a certificate"
    assert said in found


@pytest.mark.parametrize(
    ("pair", "authority", "said"),
    [
        (SERVER, OTHER, "certificate verify failed: unable to get local issuer certificate"),
        (CA.issue("example.org"), CA, "certificate verify failed: IP address mismatch"),
        (
            CA.issue(*LOCAL, valid=(-3, -1)),
            CA,
            "certificate verify failed: certificate has expired",
        ),
    ],
    ids=["authority", "name", "expired"],
)
async def test_client_refuses_a_wrong_server(
    tmp_path: Path, pair: Pair, authority: Authority, said: str
) -> None:
    """The error of the call says what is wrong with the certificate of the server."""
    files = server_files(tmp_path, pair, asks=False)
    async with serving(ServerOptions(tls=TlsContexts(files, is_server=True))) as it:
        assert said in await refusal(it.address, client(tmp_path, None, authority))


async def test_name_of_the_server_can_be_given(tmp_path: Path) -> None:
    """A server behind another address is verified by the name that is given, or a host name."""
    files = server_files(tmp_path, CA.issue("example.org", "localhost"), asks=False)
    async with serving(ServerOptions(tls=TlsContexts(files, is_server=True))) as it:
        how = client(tmp_path, None)
        async with channel(it.address, replace(how, server_name="example.org")) as calls:
            assert await calls.unary(ECHO, b"x") == b"x"
        port = it.address.rpartition(":")[2]
        async with channel(f"localhost:{port}", how) as calls:
            assert await calls.unary(ECHO, b"x") == b"x"
        assert "Hostname mismatch" in await refusal(it.address, replace(how, server_name="a.b"))
        impossible = replace(how, server_name="a" * 64)
        assert "the address cannot be used: " in await refusal(it.address, impossible)


async def test_paths_have_no_tls(tmp_path: Path) -> None:
    """A server and a client with TLS speak plainly over a path, which the system protects."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        async with serving(options(tmp_path), sock=sock, address=f"unix:{path}") as it:
            for how in (None, client(tmp_path)):
                async with channel(it.address, how) as calls:
                    assert await calls.unary(ECHO, b"x") == b"x"


async def test_connection_that_was_accepted_elsewhere_has_tls(tmp_path: Path) -> None:
    """Connections that another process accepts and hands over are secured as well."""
    async with serving(options(tmp_path)) as it:
        with socket.create_server(("127.0.0.1", 0)) as port:
            address = f"127.0.0.1:{port.getsockname()[1]}"
            async with channel(address, client(tmp_path)) as calls:
                reply = calls.unary(ECHO, b"x")
                accepted, _ = await asyncio.to_thread(port.accept)
                it.server.adopt(accepted)
                assert await reply == b"x"


# --- those that speak no TLS


async def test_client_without_tls_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client of plain HTTP/2 gets an error that says it, and so does the log."""
    caplog.set_level("DEBUG", "shalekv_wire")
    async with serving(options(tmp_path)) as it:
        assert "this port speaks TLS, and the client does not" in await refusal(it.address, None)
    assert "plain HTTP/2, as of gRPC without TLS" in caplog.text


@pytest.mark.parametrize(
    ("sent", "said", "logged"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request", "speaks no TLS: plain HTTP"),
        (PREFACE + settings_frame({}), b"this port speaks TLS", "plain HTTP/2"),
        (b"\0" * 1_000, b"", "speaks no TLS"),
    ],
    ids=["HTTP", "HTTP/2", "noise"],
)
async def test_stranger_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: bytes, said: bytes, logged: str
) -> None:
    """What speaks no TLS is disconnected at once, with an answer in its own protocol."""
    caplog.set_level("DEBUG", "shalekv_wire")
    async with serving(options(tmp_path)) as it:
        async with connected(it) as (reader, writer):
            writer.write(sent)
            got = await reader.read()
        await until(lambda: not it.server.connections, "the end of the connection")
    assert said in got
    assert logged in caplog.text


async def test_server_without_tls_is_no_server(tmp_path: Path) -> None:
    """A client with TLS says that the server has none."""
    async with serving() as it:
        assert "the server speaks no TLS" in await refusal(it.address, client(tmp_path))


async def test_half_handshakes_keep_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that begin a handshake and go no further have their time, and end."""
    caplog.set_level("DEBUG", "shalekv_wire")
    async with serving(options(tmp_path)) as it:
        sockets = [await _stranger(it.address, HALF_HELLO) for _ in range(STRANGERS)]
        try:
            async with channel(it.address, client(tmp_path)) as calls:
                assert await calls.unary(ECHO, b"x") == b"x"
                assert len(it.server.connections) == 1 + STRANGERS
                it.server.options.handshake_timeout_s = 0
                await until(lambda: len(it.server.connections) == 1, "the end of the strangers")
                assert await calls.unary(ECHO, b"x") == b"x"
        finally:
            for each in sockets:
                each.close()
    assert told(caplog, "the handshake was not done in time") == STRANGERS


async def test_probe_of_the_port_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that ends without a byte, as that of a health check of TCP, is not logged."""
    caplog.set_level("DEBUG", "shalekv_wire")
    async with serving(options(tmp_path)) as it:
        (await _stranger(it.address, b"")).close()
        (await _stranger(it.address, HALF_HELLO)).close()
        await until(lambda: "closed the connection in the handshake" in caplog.text, "a line")
        await until(lambda: not it.server.connections, "the end of both")
    assert caplog.text.count("DEBUG") == 1


async def test_oldest_handshake_ends_for_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Handshakes in progress have a number of their own: strangers can hold no more memory."""
    caplog.set_level("DEBUG", "shalekv_wire")
    with constants({"shalekv_wire.tls_transport:HANDSHAKES_MAX": 5}):
        async with serving(options(tmp_path)) as it:
            sockets = [await _stranger(it.address, HALF_HELLO) for _ in range(20)]
            await until(lambda: told(caplog, "more than 5 handshakes") == 15, "their end")
            async with channel(it.address, client(tmp_path)) as calls:
                assert await calls.unary(ECHO, b"x") == b"x"
                assert len(it.server.connections) == 5
            for each in sockets:
                each.close()


def told(caplog: pytest.LogCaptureFixture, why: str) -> int:
    """How many connections have ended so. There may be a line of another level for all of them, if
    the last one of the process is old enough.
    """
    return sum(each.levelname == "DEBUG" and why in each.getMessage() for each in caplog.records)


async def _stranger(address: str, data: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    await loop.sock_sendall(sock, data)
    return sock


@asynccontextmanager
async def connected(
    it: Serving, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of no client of gRPC."""
    host, _, port = it.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


# --- ends


async def test_calls_in_progress_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    """A stop answers what is in progress, ends a handshake at once, and leaves no connection."""
    async with serving(options(tmp_path)) as it, channel(it.address, client(tmp_path)) as calls:
        stranger = await _stranger(it.address, HALF_HELLO)
        reply = calls.unary(LATER, b"")
        await until(lambda: it.methods.later, "the call")
        await until(lambda: len(it.server.connections) == 2, "the stranger")
        stopping = asyncio.create_task(it.server.stop(60))
        assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        it.methods.later[0].reply(b"answer")
        assert await reply == b"answer"
        await stopping
        assert not it.server.connections
        stranger.close()


async def test_client_that_reads_nothing_cannot_hold_a_connection(tmp_path: Path) -> None:
    """A connection that is closed while its client does not read ends after a bounded time."""
    how = client(tmp_path)
    with constants({"shalekv_wire.server:CLOSE_TIMEOUT_S": 0.2}):
        async with serving(options(tmp_path)) as it, channel(it.address, how) as calls:
            stream = calls.stream(FLOOD)
            assert await stream.read()
            _of(calls).pause_reading()
            [connection] = it.server.connections
            connection.close()
            await until(lambda: not it.server.connections, "the end of the connection")


def _of(calls: WireChannel) -> asyncio.Transport:
    """The transport below a channel."""
    current = calls._current  # noqa: SLF001 - nothing else stops a client from reading
    assert current is not None
    transport = current._transport  # noqa: SLF001
    assert transport is not None
    return transport


async def test_end_of_the_other_side_ends_the_connection(tmp_path: Path) -> None:
    """A client that says that it closes is gone, whatever it has not read."""
    context = client(tmp_path).tls
    assert context is not None
    async with (
        serving(options(tmp_path)) as it,
        connected(it, context.current()) as (reader, writer),
    ):
        writer.write(PREFACE + settings_frame({}))
        assert await reader.read(9)
        writer.close()
        await until(lambda: not it.server.connections, "the end of the connection")


async def test_ended_connections_keep_no_memory(tmp_path: Path) -> None:
    """What OpenSSL needs is free without the garbage collector, also after half a handshake."""

    def count() -> int:
        return sum(isinstance(each, ssl.SSLObject) for each in gc.get_objects(generation=0))

    gc.collect()  # what exists is of another generation from now on
    gc.disable()
    try:
        async with serving(options(tmp_path)) as it:
            async with channel(it.address, client(tmp_path)) as calls:
                assert await calls.unary(ECHO, b"x") == b"x"
                stranger = await _stranger(it.address, HALF_HELLO)
                await until(lambda: count() == 3, "both sides, and the stranger")
            stranger.close()
            await until(lambda: not count(), "the end of all three")
    finally:
        gc.enable()


async def test_changed_record_ends_the_connection(tmp_path: Path) -> None:
    """Bytes that were changed on the way are noticed, and calls fail."""
    async with serving(options(tmp_path)) as it, channel(it.address, client(tmp_path)) as calls:
        assert await calls.unary(ECHO, b"x") == b"x"
        raw = _of(calls).get_extra_info("socket")
        call = calls.stream(ECHO)
        await call.wait_open()
        assert os.write(raw.fileno(), b"\x17\x03\x03\0\x20" + b"x" * 32) == 37
        with pytest.raises(CallFailed) as caught:
            await call.read()
        assert caught.value.code is StatusCode.UNAVAILABLE
        await until(lambda: not it.server.connections, "the end of the connection")


# --- change


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_session_is_not_resumed_when_its_authority_was_removed(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """A session lets a client in without its certificate, but not over a change of the files."""
    how = options(tmp_path)
    context = client(tmp_path).tls
    assert context is not None
    asking = context.current()
    asking.maximum_version = asking.minimum_version = version
    async with serving(how) as it:
        session, was_reused = await asyncio.to_thread(greet, it.address, asking, None)
        assert not was_reused
        session, was_reused = await asyncio.to_thread(greet, it.address, asking, session)
        assert was_reused
        OTHER.write(tmp_path)
        with pytest.raises(ssl.SSLError, match="UNKNOWN_CA"):
            await asyncio.to_thread(greet, it.address, asking, session)
