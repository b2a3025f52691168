"""TLS of a client, and to which servers its access token may be sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shalekv_client.errors import ErrorDetails, Unauthenticated
from shalekv_wire.status import Metadata

if TYPE_CHECKING:  # imported by clients that have TLS, or a token
    from pathlib import Path

    from shalekv_client.routing.access_token import TokenFunction, TokenSource
    from shalekv_wire.tls import TlsContexts


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files of a client. They are read again when they change, and count for new connections.

    By `ca` servers are verified; without it, by the authorities of the system. `certificate` and
    `key` show to servers who the client is: both or neither. `server_name` is the name that the
    certificate of a server must have, if not the host of its address.
    """

    ca: str | Path = ""
    certificate: str | Path = ""
    key: str | Path = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Security:
    """The ways in which a client knows servers and is known by them."""

    tls: TlsContexts | None = None  # None: no TLS
    server_name: str = ""  # that certificates of servers must have; empty: that of the address
    token: TokenSource | None = field(default=None, repr=False)  # None: there is none
    is_insecure: bool = False  # the token may be sent without TLS

    @classmethod
    def of(
        cls,
        addresses: Iterable[str],
        tls: TlsOptions | bool,  # noqa: FBT001 (the option of the client)
        token: str | TokenFunction | None,
        token_file: str | Path | None,
        *,
        is_insecure: bool,
    ) -> Security:
        """Take the options of a client of `addresses`. Raises ValueError for wrong ones."""
        if token is not None and token_file is not None:
            raise ValueError("give access_token or access_token_file, not both")
        source: TokenSource | None = token
        if token_file is not None:
            from pathlib import Path

            source = Path(token_file)
        contexts, options = None, TlsOptions() if isinstance(tls, bool) else tls
        if tls:
            from shalekv_wire.tls import TlsContexts, TlsFiles

            files = TlsFiles(str(options.certificate), str(options.key), str(options.ca))
            contexts = TlsContexts(files, is_server=False)
        security = cls(contexts, options.server_name, source, is_insecure)
        try:
            for address in addresses:
                security.check(address)
        except Unauthenticated as error:
            raise ValueError(str(error)) from None
        return security

    def metadata(self) -> Metadata:
        """Return what goes with every call at first. Raises as `AccessToken`."""
        if self.token is None:
            return ()
        from shalekv_client.routing.access_token import AccessToken

        return AccessToken(self.token, lambda: None).metadata

    def check(self, address: str) -> None:
        """Raise `Unauthenticated` if the token would be sent to `address` for others to read."""
        if self.token is None or self.tls is not None or self.is_insecure or _is_local(address):
            return
        message = "the access token is not sent without TLS: give tls, or insecure_token"
        raise Unauthenticated(ErrorDetails(address, "UNAUTHENTICATED", message))


NO_SECURITY = Security()


def _is_local(address: str) -> bool:
    """Return whether what is sent to `address` does not leave the machine."""
    from ipaddress import ip_address

    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
