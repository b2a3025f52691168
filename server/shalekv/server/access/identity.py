"""Credentials of calls, and the principals that they prove."""

from __future__ import annotations

from dataclasses import dataclass, field

from shalekv.protocol.access import Principal

NEVER_MS = float("inf")  # the expiry of what does not expire


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a call, and the address that it comes from."""

    peer: str  # the address, as the transport writes it
    certificate: bytes = b""  # DER of the client's certificate, which TLS has verified
    # The value of the metadata `authorization`: a secret, which no log or error may show.
    authorization: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """A principal, as some credentials prove it, until they expire."""

    principal: Principal
    expires_at_ms: float = NEVER_MS  # wall clock, milliseconds since 1970
    # What it rests on: a static token or a key of the issuer, which may be withdrawn. None: on what
    # TLS has verified, or on nothing.
    proof: object = field(default=None, repr=False)
