"""TLS between a transport of the event loop and the protocol of a connection, on both sides.

    loop ---- bytes of TLS ----> TlsTransport ---- bytes of HTTP/2 ----> protocol
         <---------------------              <-------------------------

The protocol is told of its connection at once, and what it writes is kept until the handshake is
done: the time, the number and the memory of handshakes have the limits of connections that have not
begun to speak HTTP/2. What the loop reads in a turn arrives in one piece, and what the protocol
writes in one piece is sent in one: a turn costs as few calls as without TLS.

A handshake that fails sends its alert, and the reason becomes the error of `connection_lost`. The
server reads on until the client has gone, or its time is over: closing a socket with bytes that
were not read resets the connection, and the client might never see the alert.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, cast

from shalekv_wire import frames
from shalekv_wire.frames import ErrorCode
from shalekv_wire.tls import ALPN

READ_BYTES = 16 * 1024  # at most in a record of TLS
FIRST_BYTES = frozenset((0x15, 0x16))  # of a connection: an alert, or the handshake
# Received without being of use; then the other side is disconnected. What a client sends whose
# handshake has failed is of none; later, what is more than so many times the bytes that it brings:
# a record of the smallest frame has three times its size, and new keys bring nothing.
USELESS_BYTES_MAX = 64 * 1024
RECORD_FACTOR = 4
# Handshakes of clients in progress, of all servers of a process: each takes 50 KiB. The oldest is
# ended for another one, so strangers that go no further keep nobody out.
HANDSHAKES_MAX = 1_000
PLAIN_HTTP2, PLAIN_HTTP = b"PRI * HTTP/2", (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"CONN")

_REFUSED = "this port speaks TLS, and the client does not"
_REFUSED_HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + _REFUSED.encode() + b"\n"
# Without SETTINGS before it: to clients of gRPC, the connection is one that could not be made.
_REFUSED_HTTP2 = frames.goaway_frame(0, ErrorCode.INADEQUATE_SECURITY, _REFUSED)

# What the other side does, by the end of OpenSSL's name for a problem.
_DEEDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "has shown no certificate",
    "UNSUPPORTED_PROTOCOL": "speaks no TLS of version 1.2 or later",
    "NO_SHARED_CIPHER": "has no cipher in common with this side",
    "ALERT_CERTIFICATE_REQUIRED": "wants a certificate, and got none",
    "ALERT_UNKNOWN_CA": "does not know the authority of the certificate",
    "ALERT_CERTIFICATE_EXPIRED": "refuses the certificate: it has expired",
    "ALERT_CERTIFICATE_REVOKED": "refuses the certificate: it was revoked",
    "ALERT_BAD_CERTIFICATE": "refuses the certificate",
    "ALERT_CERTIFICATE_UNKNOWN": "refuses the certificate",
    "ALERT_UNSUPPORTED_CERTIFICATE": "refuses the kind of the certificate",
    "ALERT_PROTOCOL_VERSION": "speaks no TLS of version 1.2 or later",
    "ALERT_NO_APPLICATION_PROTOCOL": "does not speak HTTP/2",
}
# Of TLS 1.2, for this and for that.
_FAILURE_ALERT = "ALERT_HANDSHAKE_FAILURE"


_in_handshake: dict[TlsTransport, None] = {}  # of clients, the oldest first


class TlsFailed(ConnectionError):
    """A connection that TLS has ended; the text says why."""


class SecuredProtocol(Protocol):
    """The protocol of a connection, as far as it is asked here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; nothing is known of the other side yet."""
        ...

    def on_secured(self, certificate: bytes) -> None:
        """Note that the handshake is done; `certificate` (DER) is that of a client, if verified."""
        ...

    def data_received(self, data: bytes) -> None:
        """Take what was received."""
        ...

    def pause_writing(self) -> None:
        """Write no more for now."""
        ...

    def resume_writing(self) -> None:
        """Write again."""
        ...

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        ...


class TlsTransport(asyncio.Protocol):
    """One connection: a protocol to the loop, and a transport to the protocol of HTTP/2."""

    __slots__ = (
        "_early",
        "_failure",
        "_has_heard",
        "_incoming",
        "_inner",
        "_is_done",
        "_is_server",
        "_outgoing",
        "_tls",
        "_transport",
        "_useless_bytes",
        "_wrap",
    )

    def __init__(
        self, inner: SecuredProtocol, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        """`server_name` is that of the server, for a client; None: this is a server.

        Raises ValueError for a `server_name` that none can have.
        """
        self._inner = inner
        self._is_server = server_name is None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._wrap = partial(
            context.wrap_bio,
            self._incoming,
            self._outgoing,
            server_side=self._is_server,
            server_hostname=server_name,
        )
        # None: the client has said nothing yet.
        self._tls = cast("ssl.SSLObject", None if self._is_server else self._wrap())
        self._transport = cast("asyncio.Transport", None)  # set before all else is called
        self._early: list[bytes] | None = []  # written before the handshake was done; None: it is
        self._has_heard = False  # something of the other side
        self._is_done = False  # nothing is read or written any more
        self._failure: TlsFailed | None = None
        self._useless_bytes = 0

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(cast("asyncio.Transport", self))
        if self._is_server:
            _in_handshake[self] = None
            if len(_in_handshake) > HANDSHAKES_MAX:
                oldest = next(iter(_in_handshake))
                oldest.end(f"more than {HANDSHAKES_MAX} handshakes were in progress")
        else:
            self._shake()

    def data_received(self, data: bytes) -> None:
        if self._is_done:
            self._count(len(data), 0)
            return
        if not self._has_heard:
            self._has_heard = True
            if data[0] not in FIRST_BYTES:
                self._fail_plain(data)
                return
            if self._is_server:  # strangers that are silent, or speak no TLS, cost nothing
                self._tls = self._wrap()
        self._incoming.write(data)
        if self._early is not None and not self._shake():
            return
        self._read(len(data))

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _in_handshake.pop(self, None)
        # A client that has said nothing is a probe of the port, and no failure.
        is_cut = self._early is not None and not self._is_done
        if is_cut and (self._has_heard or not self._is_server):
            self._failure = TlsFailed(f"{self._peer} has closed the connection in the handshake")
        self._is_done = True
        self._early = None
        # Much memory, and in a cycle with the protocol: it is not left to the garbage collector.
        del self._tls, self._wrap, self._incoming, self._outgoing
        self._inner.connection_lost(self._failure or exc)

    # --- the transport of the protocol

    def write(self, data: bytes) -> None:
        """Send `data`."""
        if self._is_done:
            return
        if self._early is not None:
            self._early.append(data)
            return
        try:
            written = self._tls.write(data)
            while written < len(data):
                written += self._tls.write(memoryview(data)[written:])
        except ssl.SSLError as error:
            self._fail(self._reason(error))
            return
        self._transport.write(self._outgoing.read())

    def close(self) -> None:
        """Tell the other side, and close when all is sent."""
        if not self._is_done and self._early is None:
            with suppress(ssl.SSLError):  # it has not told us yet, which is not waited for
                self._tls.unwrap()
            self._send()
        self._is_done = True
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._early is not None and self._failure is None:
            self._failure = TlsFailed("the handshake was not done in time")
        self._is_done = True
        self._transport.abort()

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """Set after how many bytes `pause_writing` is called."""
        self._transport.set_write_buffer_limits(high=high)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that are not sent yet."""
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str) -> Any:
        """Return what the transport of the loop knows."""
        return self._transport.get_extra_info(name)

    # --- the rest

    def end(self, text: str) -> None:
        """Disconnect a client in its handshake; the log says why."""
        _in_handshake.pop(self, None)
        self._failure = TlsFailed(text)
        self.abort()

    @property
    def _peer(self) -> str:
        return "the client" if self._is_server else "the server"

    def _shake(self) -> bool:
        """Go on with the handshake; return whether it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return False
        except ssl.SSLError as error:
            self._fail(self._reason(error))
            return False
        if self._tls.selected_alpn_protocol() != ALPN:
            self._fail(f"{self._peer} does not choose HTTP/2 by ALPN")
            return False
        early, self._early = self._early, None
        _in_handshake.pop(self, None)
        self._send()
        certificate = self._tls.getpeercert(binary_form=True) if self._is_server else None
        self._inner.on_secured(certificate or b"")
        if early:
            self.write(b"".join(early))
        return True

    def _read(self, received_bytes: int) -> None:
        tls, incoming, pieces, is_end = self._tls, self._incoming, [], False
        try:
            while incoming.pending or tls.pending():
                piece = tls.read(READ_BYTES)
                if not piece:
                    is_end = True
                    break
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            is_end = True
        except ssl.SSLError as error:
            self._fail(self._reason(error))
            return
        if self._outgoing.pending:  # new keys
            self._send()
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._count(received_bytes, len(data))
        if data and not self._is_done:
            self._inner.data_received(data)
        if is_end:
            self.close()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _fail(self, text: str) -> None:
        """End the connection, after the alert that OpenSSL has made."""
        if self._is_done:
            return
        self._failure = TlsFailed(text)
        self._is_done = True
        self._send()
        if self._is_server and self._early is not None and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _fail_plain(self, data: bytes) -> None:
        """End the connection with an answer that the other side understands, if it is a client."""
        text = f"{self._peer} speaks no TLS"
        if self._is_server and data.startswith(PLAIN_HTTP2):
            text += ": plain HTTP/2, as of gRPC without TLS"
            self._transport.write(_REFUSED_HTTP2)
        elif self._is_server and data.startswith(PLAIN_HTTP):
            text += ": plain HTTP"
            self._transport.write(_REFUSED_HTTP)
        self._fail(text)

    def _count(self, received_bytes: int, useful_bytes: int) -> None:
        """Disconnect the other side if it sends too much that is of no use."""
        useless = self._useless_bytes + received_bytes - RECORD_FACTOR * useful_bytes
        self._useless_bytes = max(useless, 0)
        if useless > USELESS_BYTES_MAX:
            self.abort()

    def _reason(self, error: ssl.SSLError) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"certificate verify failed: {error.verify_message}"
        reason = error.reason or str(error)
        for name, text in _DEEDS.items():
            if reason.endswith(name):
                return f"{self._peer} {text}"
        if reason.endswith(_FAILURE_ALERT) and not self._is_server:
            return f"{self._peer} refuses the handshake: it may want a certificate"
        return f"TLS with {self._peer} failed: {reason.lower().replace('_', ' ')}"
