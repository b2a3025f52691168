"""Finds out who calls, from the token or the certificate of a call.

A peer whose credentials are not valid again and again has to wait. A peer is an address without its
port, or the /64 of an IPv6 address. After `FREE` failures each further one is followed by a time in
which new credentials of the peer are refused without a look at them; it doubles from `FIRST_MS` to
`LONGEST_MS`. So a refusal does not depend on what it refuses, and costs less than a look. Nothing
waits: there is no task that a stranger could make.

Failures are forgiven with time, half of them in each `HALF_LIFE_MS`, and all at once when new
credentials of the peer are valid. Many callers may share an address, and one of them must not lock
out the others: credentials that were valid before are remembered by the guard, and do not come
here, and of new ones one in `LUCKY`, drawn at random, is looked at all the same, however long the
others fail.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from urllib.parse import unquote

import structlog

from shalekv.errors import Unauthenticated
from shalekv.protocol.access import ANONYMOUS
from shalekv.runtime import Runtime
from shalekv.server.access.certificates import decode_certificate
from shalekv.server.access.identity import NEVER_MS, Credentials, Identity
from shalekv.server.access.issuer import Issuer
from shalekv.server.access.tokens import PREFIX, StaticToken, TokenFile
from shalekv.settings.security import AccessSettings

AUTHORIZATION_CHARS_MAX = 8 << 10
FILE_INTERVAL_MS = 1_000.0  # between two looks at the token file

FREE = 5  # failures without a consequence
FIRST_MS, LONGEST_MS = 250.0, 10_000.0
HALF_LIFE_MS = 120_000.0
COUNTED_MAX = 12.0  # enough for the longest time, and halved to `FREE` in some minutes
LUCKY = 16
PEERS_MAX = 4_096
LOG_INTERVAL_MS = 1_000.0
NETWORK_BITS = 64

_PEER = re.compile(r"(ipv[46]):(.+):\d+")
# One space: a value with more would be remembered as that of another caller.
_BEARER = re.compile(r"bearer ([\x21-\x7e]+)", re.IGNORECASE | re.ASCII)
_NOBODY = Identity(ANONYMOUS)

_log = structlog.get_logger(__name__)


class Authenticator:
    """Identities of callers. Its owner runs `run`, which follows what they are proven by."""

    def __init__(self, settings: AccessSettings, runtime: Runtime) -> None:
        """Read the files of the settings, which blocks. Raises `InvalidSetting`."""
        self._clock = runtime.clock
        self._workers = runtime.workers
        self._tokens = TokenFile(settings.tokens_file) if settings.tokens_file else None
        has_issuer = bool(settings.oidc_issuer)
        self._issuer = Issuer(settings, runtime) if has_issuer else None
        self._failures = PeerFailures(runtime.random)

    def identify(self, credentials: Credentials) -> Identity | Awaitable[Identity]:
        """Return the identity; an awaitable if a key of the issuer has to be fetched.

        A bearer token counts before a certificate. Without either the caller is ANONYMOUS.

        Raises:
            Unauthenticated: credentials are not valid, or have expired; or this peer has sent too
                many that were not valid, and has to wait before others are looked at.
            IssuerUnavailable: a token cannot be verified now.
        """
        if credentials.authorization:
            return self._examine(credentials)
        if not credentials.certificate:
            return _NOBODY
        identity = decode_certificate(credentials.certificate)
        if self._has_expired(identity):
            raise Unauthenticated("the certificate has expired")
        return identity

    def is_valid(self, identity: Identity) -> bool:
        """Return whether the identity has not expired, and what proves it was not withdrawn."""
        if self._has_expired(identity):
            return False
        proof = identity.proof
        if proof is None:
            return True
        if isinstance(proof, StaticToken):
            return self._tokens is not None and self._tokens.has(proof)
        return self._issuer is not None and self._issuer.has(proof)

    async def run(self) -> None:
        """Read the token file when it changes, and keep the keys of the issuer, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._tokens is not None:
                tasks.create_task(self._follow(self._tokens), name="token file")
            if self._issuer is not None:
                tasks.create_task(self._issuer.run(), name="keys of the issuer")

    def _examine(self, credentials: Credentials) -> Identity | Awaitable[Identity]:
        peer = network_of(credentials.peer)
        self._failures.check(peer, self._clock.monotonic_ms())
        with self._counting(peer):
            token = _token_of(credentials.authorization)
            identity = self._find(token)
        if identity is None:
            return self._find_later(peer, token)
        return self._proven(peer, identity)

    def _find(self, token: str) -> Identity | None:
        """Return what a token proves, expired or not; None: `_find_later` has to wait for it."""
        if token.startswith(PREFIX):
            if self._tokens is None:
                raise Unauthenticated("this server accepts no static tokens")
            return self._tokens.identify(token)
        if self._issuer is None:
            raise Unauthenticated("this server accepts no tokens of this kind")
        return self._issuer.identify(token)

    async def _find_later(self, peer: str, token: str) -> Identity:
        assert self._issuer is not None  # nothing else has to be waited for
        with self._counting(peer):
            identity = await self._issuer.identify_later(token)
        return self._proven(peer, identity)

    @contextmanager
    def _counting(self, peer: str) -> Iterator[None]:
        """Count credentials that are not valid."""
        try:
            yield
        except Unauthenticated:
            self._failures.add(peer, self._clock.monotonic_ms())
            raise

    def _proven(self, peer: str, identity: Identity) -> Identity:
        """Return an identity that was proven. A token that has expired is not counted: no guess."""
        if self._has_expired(identity):
            raise Unauthenticated("the token has expired")
        self._failures.forgive(peer)
        return identity

    def _has_expired(self, identity: Identity) -> bool:
        expires_at_ms = identity.expires_at_ms
        return expires_at_ms != NEVER_MS and self._now_ms() >= expires_at_ms

    def _now_ms(self) -> float:
        """Return the wall clock; without one all that expires has expired."""
        now_ms = self._clock.wall_ms()
        return NEVER_MS if now_ms is None else now_ms

    async def _follow(self, tokens: TokenFile) -> None:
        while True:
            await self._clock.sleep_ms(FILE_INTERVAL_MS)
            await self._workers.run(tokens.refresh)


@dataclass(slots=True)
class _Failures:
    count: float  # as of `last_ms`; it decays
    last_ms: float
    refused_until_ms: float = 0.0

    def at(self, now_ms: float) -> float:
        return self.count * math.exp2(-(now_ms - self.last_ms) / HALF_LIFE_MS)


class PeerFailures:
    """The failures of peers, at most those of the `PEERS_MAX` that have failed last."""

    def __init__(self, random: Random) -> None:
        """`random` draws what is looked at all the same."""
        self._random = random
        self._of: dict[str, _Failures] = {}  # the peer that has failed last is the last
        self._next_log_ms = 0.0

    def check(self, peer: str, now_ms: float) -> None:
        """Raise `Unauthenticated` if new credentials of a peer are not looked at now."""
        found = self._of.get(peer)
        if found is None or now_ms >= found.refused_until_ms:
            return
        if self._random.randrange(LUCKY) == 0:
            return
        left_ms = math.ceil(found.refused_until_ms - now_ms)
        raise Unauthenticated(
            "credentials that came from this address were not valid, too often: others are looked "
            f"at in {left_ms} ms",
            retry_after_ms=left_ms,
        )

    def add(self, peer: str, now_ms: float) -> None:
        """Note that credentials of a peer were not valid."""
        found = self._of.pop(peer, None)
        count = 1.0 if found is None else min(found.at(now_ms) + 1.0, COUNTED_MAX)
        noted = self._of[peer] = _Failures(count, now_ms)
        if len(self._of) > PEERS_MAX:
            del self._of[next(iter(self._of))]
        if count <= FREE:
            return
        wait_ms = min(FIRST_MS * 2.0 ** (count - FREE - 1.0), LONGEST_MS)
        noted.refused_until_ms = now_ms + wait_ms
        if now_ms >= self._next_log_ms:
            self._next_log_ms = now_ms + LOG_INTERVAL_MS
            _log.warning("credentials of a peer are not valid, again and again", peer=peer)

    def forgive(self, peer: str) -> None:
        """Forget the failures of a peer: new credentials of it were valid."""
        self._of.pop(peer, None)


def _token_of(authorization: str) -> str:
    """Return the token in the value of the metadata. Raises `Unauthenticated`."""
    if len(authorization) > AUTHORIZATION_CHARS_MAX:
        raise Unauthenticated(
            f"`authorization` is longer than {AUTHORIZATION_CHARS_MAX} characters"
        )
    found = _BEARER.fullmatch(authorization)
    if found is None:
        raise Unauthenticated("`authorization` is not `Bearer` with a token")
    return found[1]


@lru_cache(maxsize=1_024)  # a connection has one peer
def network_of(peer: str) -> str:
    """Return the address of a peer without its port; of IPv6, its /64."""
    found = _PEER.fullmatch(unquote(peer))
    host = found[2].strip("[]") if found else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return peer.partition(":")[0]  # a socket of this machine
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> NETWORK_BITS << NETWORK_BITS, NETWORK_BITS)))
