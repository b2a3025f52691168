"""An OpenID Connect issuer on a socket, with TLS, and with faults."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from tests.kit.certificates import Authority

AUDIENCE = "shalekv"
PrivateKey: TypeAlias = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
Answer: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CURVES: Mapping[str, ec.EllipticCurve] = {
    "ES256": ec.SECP256R1(),
    "ES384": ec.SECP384R1(),
    "ES512": ec.SECP521R1(),
}


@cache
def private_key(algorithm: str, number: int = 0, bits: int = 2_048) -> PrivateKey:
    """Make a key once for each number; all algorithms of RSA have the same."""
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm])
    if algorithm != "RS256":
        return private_key("RS256", number, bits)
    return rsa.generate_private_key(65_537, bits)


def public_jwk(algorithm: str, key: PrivateKey, **fields: Any) -> dict[str, Any]:
    """Return the public key of a private one as a JWK."""
    jwk: dict[str, Any] = get_default_algorithms()[algorithm].to_jwk(key.public_key(), as_dict=True)
    return jwk | fields


class TokenIssuer:
    """The issuer: what it answers may be changed at any time."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        self.ca = self.authority.write(folder, "issuer-ca")
        pair = self.authority.issue("localhost", "127.0.0.1").write(folder, "issuer")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(pair.certificate, pair.key)
        self.url = ""
        self.requests: Counter[str] = Counter()
        self.keys: list[dict[str, Any]] = []
        self.cache_control = "public, max-age=600"
        self.answer: Answer | None = None  # instead of the keys
        self.configuration: dict[str, Any] = {}  # over what it would say of itself
        self.rotate("k1")

    def rotate(self, *key_ids: str) -> None:
        """Have keys with these ids and no others, for EdDSA."""
        self.keys = [
            public_jwk("EdDSA", private_key("EdDSA", _number(each)), kid=each) for each in key_ids
        ]

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Return claims of a valid token; those that are None are left out."""
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "exp": 2**32} | changed
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, key_id: str = "k1", **changed: Any) -> str:
        """Sign a token with a key that `rotate` makes."""
        key = private_key("EdDSA", _number(key_id))
        return jwt.encode(self.claims(**changed), key, "EdDSA", {"kid": key_id})

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.requests[request.path] += 1
        if request.path.endswith("/.well-known/openid-configuration"):
            found = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"} | self.configuration
            return web.json_response(found)
        if self.answer is not None:
            return await self.answer(request)
        headers = {"Cache-Control": self.cache_control}
        return web.json_response({"keys": self.keys}, headers=headers)

    @property
    def fetches(self) -> int:
        return self.requests["/keys"]


def _number(key_id: str) -> int:
    return int(key_id.removeprefix("k"))


@asynccontextmanager
async def token_issuer(folder: Path, port: int = 0) -> AsyncIterator[TokenIssuer]:
    """Run an issuer until the end of the block."""
    issuer = TokenIssuer(folder)
    async with serving(issuer, port):
        yield issuer


@asynccontextmanager
async def serving(issuer: TokenIssuer, port: int = 0) -> AsyncIterator[None]:
    """Answer requests until the end of the block; `port` 0 is a free one."""
    application = web.Application()
    application.router.add_get("/{path:.*}", issuer.respond)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=issuer.context)
    await site.start()
    issuer.url = f"https://localhost:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()


async def megabytes(_request: web.Request) -> web.StreamResponse:
    """Answer with far more than keys could be."""
    return web.Response(body=b" " * 4_000_000 + b'{"keys": []}')


async def compressed(_request: web.Request) -> web.StreamResponse:
    """Answer with little that becomes far too much."""
    body = gzip.compress(b" " * 4_000_000 + b'{"keys": []}')
    return web.Response(body=body, headers={"Content-Encoding": "gzip"})


async def silence(_request: web.Request) -> web.StreamResponse:
    """Answer never."""
    await asyncio.Event().wait()
    raise AssertionError


async def elsewhere(_request: web.Request) -> web.StreamResponse:
    """Redirect to another host."""
    raise web.HTTPFound("https://example.org/keys")
