"""Credentials of calls, and the principals that they prove."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from shalekv.protocol.access import Principal


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a call shows of its caller."""

    peer: str  # the address, as the transport writes it
    certificate: bytes = b""  # DER of the client's certificate, which TLS has verified
    authorization: str = ""  # the value of the metadata `authorization`


@dataclass(frozen=True, slots=True)
class Identity:
    """A principal, as some credentials prove it, until they expire."""

    principal: Principal
    expires_at_ms: float = float("inf")  # wall clock, milliseconds since 1970
    # What proves it: id of a static token. It ends when the token is removed from the file.
    token_id: str = ""


class Authenticator(Protocol):
    """Finds out who calls."""

    def identify(self, credentials: Credentials) -> Identity | Awaitable[Identity]:
        """Return the identity; an awaitable if a key of the issuer has to be fetched.

        A bearer token counts before a certificate. Without either the caller is ANONYMOUS. Raises
        `Unauthenticated` for credentials that are not valid, also after a delay of no more than a
        second for a peer with many failures, and `Overloaded` while such a peer is refused.
        """
        ...

    def is_valid(self, identity: Identity) -> bool:
        """Return whether the identity has not expired, and its token was not removed."""
        ...
