"""The keys of an OpenID Connect issuer: fetched, kept, and fetched again before they are too old.

They are fetched in the background, when they are as old as their `Cache-Control` allows, or as is
sensible (`FRESH_S_MIN` to `FRESH_S_MAX`). A token that names a key that is not among them makes
that happen at once, but at most once in `ASKED_INTERVAL_MS`, however many such tokens come. Calls
with such a token wait for that one fetch, `WAITING_MAX` of them at most; others end with
`IssuerUnavailable`.

While the issuer does not answer, the keys that were fetched last count until they are
`KEYS_AGE_MS_MAX` old. After it, and before the first keys are there, tokens are neither valid nor
invalid: calls end with `IssuerUnavailable`, which tells clients to try again, and not to get
another token.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
)

from shalekv.concurrency import Waiter, complete, new_waiter
from shalekv.errors import InvalidSetting, IssuerUnavailable, Unauthenticated
from shalekv.runtime import Runtime
from shalekv.server.access.identity import Identity
from shalekv.server.access.web_tokens import (
    WebKey,
    WebToken,
    parse_document,
    parse_keys,
    parse_web_token,
)
from shalekv.settings.security import AccessSettings
from shalekv.store.url import is_loopback
from shalekv.wording import MS_PER_S

DISCOVERY = "/.well-known/openid-configuration"
REQUEST_S = 5.0
REPLY_BYTES_MAX = 256 << 10
FRESH_S_MIN, FRESH_S_MAX, FRESH_DEFAULT_S = 60, 3_600, 300
KEYS_AGE_MS_MAX = 4 * 3_600_000.0  # hardly a token lives longer, and there are no new ones
ASKED_INTERVAL_MS = 5_000.0
RETRY_MS, RETRY_MS_MAX = 1_000.0, 60_000.0
WAITING_MAX = 256  # calls
WAIT_S = 2 * REQUEST_S + 1.0

_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])", re.ASCII | re.IGNORECASE)

_log = structlog.get_logger(__name__)


class IssuerTrouble(Exception):
    """The issuer has not answered, or not as it should."""


class _Fetched(NamedTuple):
    keys: Sequence[WebKey]
    fresh_s: int  # time until they should be fetched again


class Issuer:
    """Verifies the web tokens of an issuer by its keys, which `run` keeps up to date."""

    def __init__(self, settings: AccessSettings, runtime: Runtime) -> None:
        """Begin without keys. Raises `InvalidSetting`."""
        self._url, self._audience = settings.oidc_issuer, settings.oidc_audience
        self._ca = settings.oidc_ca
        self._runtime = runtime
        self._keys: list[WebKey] = []
        self._fetched_ms = -inf  # when the fetch of the keys began
        self._began_ms = -inf  # when the last fetch began
        self._is_fetching = False
        self._problem = "not fetched yet"  # why the last fetch has failed
        self._asked = asyncio.Event()
        self._waiting: dict[Waiter, None] = {}  # calls that wait for the next end of a fetch
        try:
            check_issuer_url(self._url)
            _tls_context(self._ca)
        except (IssuerTrouble, OSError, ValueError) as error:
            raise InvalidSetting(f"--oidc-issuer, --oidc-ca: {error}") from None

    def identify(self, text: str) -> Identity | None:
        """Return the identity that a token proves, expired or not.

        None: the keys have to be fetched first, for which `identify_later` waits.

        Raises `Unauthenticated`, and `IssuerUnavailable`.
        """
        token = parse_web_token(text, issuer=self._url, audience=self._audience)
        is_settled = not self._is_fetching and self._since_ms(self._began_ms) < ASKED_INTERVAL_MS
        return self._verify(token) if is_settled or token.fitting(self._keys) else None

    async def identify_later(self, text: str) -> Identity:
        """Return the same when the fetch of the keys ends that runs now, or begins now."""
        token = parse_web_token(text, issuer=self._url, audience=self._audience)
        if len(self._waiting) >= WAITING_MAX:
            raise IssuerUnavailable("too many tokens wait for the keys of their issuer")
        if not self._is_fetching:
            self._asked.set()
        fetched = new_waiter()
        self._waiting[fetched] = None
        try:
            async with asyncio.timeout(WAIT_S):
                await fetched
        except TimeoutError:
            raise IssuerUnavailable("the keys of the issuer were not fetched in time") from None
        finally:
            del self._waiting[fetched]
        return self._verify(token)

    def has(self, key: object) -> bool:
        """Return whether a key still counts."""
        return key in self._keys

    async def run(self) -> None:
        """Fetch the keys, and again when it is time, until cancelled."""
        timeout, cookies = ClientTimeout(total=REQUEST_S), DummyCookieJar()
        retry_ms = RETRY_MS
        async with ClientSession(
            timeout=timeout, cookie_jar=cookies, auto_decompress=False
        ) as session:
            while True:
                self._asked.clear()
                fetched = await self._refresh(session)
                if fetched is None:
                    wait_ms, retry_ms = retry_ms, min(2 * retry_ms, RETRY_MS_MAX)
                else:
                    wait_ms, retry_ms = fetched.fresh_s * MS_PER_S, RETRY_MS
                wait_ms *= 1.0 - self._runtime.random.random() / 10  # not all processes at once
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_ms / MS_PER_S):
                        await self._asked.wait()

    async def _refresh(self, session: ClientSession) -> _Fetched | None:
        """Fetch the keys, and let the calls go on that wait for them; None: it has failed."""
        self._began_ms = self._runtime.clock.monotonic_ms()
        self._is_fetching = True
        try:
            fetched = await self._fetch(session)
            self._keep(fetched.keys)
            return fetched
        except IssuerTrouble as trouble:
            if str(trouble) != self._problem:
                _log.warning("keys of the issuer not fetched", problem=str(trouble))
            self._problem = str(trouble)
            if self._since_ms(self._fetched_ms) >= KEYS_AGE_MS_MAX:
                self._keys = []
            return None
        finally:
            self._is_fetching = False
            for waiter in self._waiting:
                complete(waiter)

    def _keep(self, keys: Sequence[WebKey]) -> None:
        # What stays the same stays the same object: identities that it has proven stay valid.
        kept = [next((old for old in self._keys if old.is_same(each)), each) for each in keys]
        if self._problem or kept != self._keys:
            _log.info("keys of the issuer fetched", keys=len(kept))
        self._keys, self._fetched_ms, self._problem = kept, self._began_ms, ""

    def _verify(self, token: WebToken) -> Identity:
        if not token.fitting(self._keys):
            if self._problem:
                raise IssuerUnavailable("the token cannot be verified: its issuer does not answer")
            raise Unauthenticated("the issuer of the token has no key that fits it")
        now_ms = self._runtime.clock.wall_ms()
        return token.verify(self._keys, 0 if now_ms is None else now_ms)

    def _since_ms(self, then_ms: float) -> float:
        return self._runtime.clock.monotonic_ms() - then_ms

    async def _fetch(self, session: ClientSession) -> _Fetched:
        """Fetch the keys. Raises `IssuerTrouble`."""
        try:
            tls = await self._runtime.workers.run(_tls_context, self._ca)
            reply = await _get(session, self._url.rstrip("/") + DISCOVERY, tls)
            found = parse_document(reply.body)
            if found.get("issuer") != self._url:
                raise IssuerTrouble("its configuration is that of another issuer")
            keys_url = found.get("jwks_uri")
            if not isinstance(keys_url, str):
                raise IssuerTrouble("its configuration names no keys")
            check_issuer_url(keys_url)
            reply = await _get(session, keys_url, tls)
            return _Fetched(parse_keys(reply.body), _fresh_s(reply.cache_control))
        except OSError as error:
            raise IssuerTrouble(f"--oidc-ca: {error}") from error
        except ValueError as error:
            raise IssuerTrouble(f"its answer cannot be used: {error}") from error


class _Reply(NamedTuple):
    body: bytes
    cache_control: str


async def _get(session: ClientSession, url: str, tls: ssl.SSLContext) -> _Reply:
    """Send one request; follows no redirection. Raises `IssuerTrouble`."""
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    body = bytearray()
    try:
        async with session.get(url, headers=headers, ssl=tls, allow_redirects=False) as reply:
            if reply.status != HTTPStatus.OK:
                raise IssuerTrouble(f"{url} has answered {reply.status}")
            async for chunk in reply.content.iter_any():
                body += chunk
                if len(body) > REPLY_BYTES_MAX:
                    raise IssuerTrouble(f"the reply of {url} is larger than {REPLY_BYTES_MAX}")
            return _Reply(bytes(body), reply.headers.get("Cache-Control", ""))
    except (ClientError, OSError, ValueError) as error:
        raise IssuerTrouble(f"{url} does not answer: {_why(error)}") from error


def _why(error: Exception) -> str:
    match error:
        case ClientConnectorCertificateError():
            return str(error.certificate_error)
        case ClientConnectorError():
            return str(error.os_error)
        case _:
            return str(error) or "not in time"


def _fresh_s(cache_control: str) -> int:
    """Return for how long keys are kept before they are fetched again."""
    found = _MAX_AGE.search(cache_control)
    seconds = int(found[1]) if found else FRESH_DEFAULT_S
    return min(max(seconds, FRESH_S_MIN), FRESH_S_MAX)


def check_issuer_url(url: str) -> None:
    """Raise `IssuerTrouble` unless a URL has https, or is one of this machine."""
    try:
        parts = urlsplit(url)
        host, is_plain = parts.hostname or "", "@" not in parts.netloc and not parts.fragment
        _ = parts.port
    except ValueError as error:
        raise IssuerTrouble(f"{url!r} is not a URL: {error}") from None
    if not host or not is_plain or not url.isprintable():
        raise IssuerTrouble(f"{url!r} is not a URL of a host alone")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise IssuerTrouble(f"{url!r} has not https, which only URLs of this machine may lack")


def _tls_context(authority: str) -> ssl.SSLContext:
    """Make what verifies the issuer, of the authorities in a file, or of the system."""
    return ssl.create_default_context(cafile=authority or None)
