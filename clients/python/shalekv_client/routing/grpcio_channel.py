"""The transport of grpcio under the interface of `shalekv_wire.calls`: the fallback.

Nothing imports this module, and so grpcio, unless the fallback was chosen.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc

from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.tls import Contents, TlsContexts

Options: TypeAlias = Sequence[tuple[str, int | str]]
_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
_Multicallable: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
_UnaryMulticallable: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_State = grpc.ChannelConnectivity

# The messages of gRPC when it has no connection for a call. If gRPC changes them, the call counts
# as one whose connection was lost, and its outcome as unknown as before.
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")

ValueT = TypeVar("ValueT")


def call_failed(error: grpc.aio.AioRpcError) -> CallFailed:
    """Convert an error of grpcio."""
    metadata = (*(error.trailing_metadata() or ()), *(error.initial_metadata() or ()))
    return _failure(error.code(), error.details(), metadata)


def _failure(code: grpc.StatusCode, message: str | None, metadata: Metadata) -> CallFailed:
    text = message or ""
    is_unsent = code is grpc.StatusCode.UNAVAILABLE and text.startswith(_NO_CONNECTION)
    if is_unsent:
        reason = text.removesuffix(": OK").rpartition(": ")[2].rstrip("]")
        text = f"no connection to the server: {reason}"
    return CallFailed(StatusCode(code.value[0]), text, metadata=metadata, is_unsent=is_unsent)


@contextmanager
def _own_errors(ending: Callable[[], CallFailed | None] = lambda: None) -> Iterator[None]:
    """Raise errors of grpcio as `CallFailed`: as what `ending` returns, if the status is known."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ending() or call_failed(error) from None
    except asyncio.InvalidStateError:
        raise ending() or CallFailed(StatusCode.UNAVAILABLE, "the call is over") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpcio raises the same for a call that was cancelled.
        raise CallFailed(StatusCode.CANCELLED, "the call was cancelled by the client") from None


class GrpcioChannel:
    """A `shalekv_wire.calls.Channel` by grpcio. Needs a running event loop."""

    def __init__(
        self,
        address: str,
        options: Options,
        tls: TlsContexts | None = None,
        server_name: str = "",
    ) -> None:
        """Create a channel with `options` of gRPC's core, which connects at its first call.

        `server_name` is what the certificate of the server must have, if that is not the host of
        `address`. Connections to unix:PATH have no TLS.
        """
        asyncio.get_running_loop()  # without a loop, the channel would belong to another one
        self.address = address
        self._options = options
        if server_name:
            self._options = (*options, ("grpc.ssl_target_name_override", server_name))
        self._tls = None if address.startswith("unix:") else tls
        self._metadata: Metadata = ()  # of every call
        self._contents = Contents()  # of the files of TLS
        self._channel = self._open()

    def set_metadata(self, metadata: Metadata) -> None:
        self._metadata = tuple(metadata)

    async def unary(
        self, path: str, request: bytes, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        method: _UnaryMulticallable = self._current().unary_unary(path)
        with _own_errors():
            return await method(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))

    def stream(
        self, path: str, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> GrpcioStream:
        method: _Multicallable = self._current().stream_stream(path)
        return GrpcioStream(method(timeout=timeout_s, metadata=(*self._metadata, *metadata)))

    async def wait_ready(self, timeout_s: float) -> None:
        if self._current().get_state() is _State.TRANSIENT_FAILURE:
            # It would wait before it tries again, and report the failure until then. It is closed
            # when nothing refers to it any more.
            self._channel = self._open()
        state = self._channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(timeout_s):
                while state is not _State.READY:
                    if state is _State.TRANSIENT_FAILURE:
                        raise _not_ready("no connection to the server: nobody answers there")
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise _not_ready(f"no connection to the server within {timeout_s:g} s") from None

    async def close(self) -> None:
        await self._channel.close()

    def _current(self) -> grpc.aio.Channel:
        """Return the channel for a new call: another one when the files of TLS have changed.

        The one before is closed when no call refers to it any more.
        """
        if self._tls is not None:
            self._tls.current()
            if self._tls.contents is not self._contents:
                self._channel = self._open()
        return self._channel

    def _open(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.address, options=self._options)
        self._contents = found = self._tls.contents
        authorities = found.authority or _authorities(self._tls.current())
        credentials = grpc.ssl_channel_credentials(
            authorities or None, found.key or None, found.certificate or None
        )
        return grpc.aio.secure_channel(self.address, credentials, options=self._options)


def _authorities(context: ssl.SSLContext) -> bytes:
    """Return the authorities of the system, which grpcio does not use by itself."""
    certificates = context.get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, certificates)).encode()


def _not_ready(message: str) -> CallFailed:
    return CallFailed(StatusCode.UNAVAILABLE, message, is_unsent=True)


class GrpcioStream:
    """A `shalekv_wire.calls.ClientStream` by grpcio.

    Other than there, cancelling a task that waits in `read` or `write` cancels the call: grpcio
    does so.
    """

    def __init__(self, call: _Call) -> None:
        """Use `call`, which has begun."""
        self._call = call
        self._ending: CallFailed | None = None  # the status, once it has arrived
        call.add_done_callback(self._note_ending)

    async def wait_open(self) -> None:
        with _own_errors(lambda: self._ending):
            await self._call.wait_for_connection()

    async def write(self, message: bytes) -> None:
        with _own_errors(lambda: self._ending):
            await self._call.write(message)

    async def done_writing(self) -> None:
        with _own_errors(lambda: self._ending):
            await self._call.done_writing()

    async def read(self) -> bytes | None:
        with _own_errors(lambda: self._ending):
            message: Any = await self._call.read()
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        self._call.cancel()

    def _note_ending(self, call: _Call) -> None:
        """Keep the status with which the call has ended.

        When a stream ends while a message is written to it, grpcio reports the failed write as the
        status of the stream: INTERNAL, with a text of its own, instead of the status that the
        server has sent. Only a callback that runs when that status arrives sees it.
        """
        code = _now(call.code())
        if code is grpc.StatusCode.OK:
            return
        trailing, initial = _now(call.trailing_metadata()), _now(call.initial_metadata())
        self._ending = _failure(code, _now(call.details()), (*(trailing or ()), *(initial or ())))


def _now(coroutine: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Return the result of a coroutine that does not wait, such as those of a call that is done."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value  # type: ignore[no-any-return] # StopIteration is not generic
    coroutine.close()
    raise RuntimeError("the call is not done")
