"""Credentials of callers, and the files of tokens."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from warnings import catch_warnings, simplefilter

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.utils import CryptographyDeprecationWarning
from jwt.algorithms import OKPAlgorithm
from trustme import CA

from shalekv.errors import Unauthenticated
from shalekv.server.access.certificates import decode_certificate
from shalekv.server.access.tokens import new_token, parse_token, parse_tokens
from shalekv.server.access.web_tokens import (
    WebKey,
    parse_document,
    parse_keys,
    parse_web_token,
)
from tests.fuzz.decoders.decoder import Decoder

NOW_MS = 1_700_000_000_000


def text_of(data: bytes) -> str:
    return data.decode("latin-1")


def certificate_of(*names: str) -> bytes:
    """Return a certificate for these names in DER."""
    pem = CA().issue_cert(*names).cert_chain_pems[0].bytes()
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def _names_of(data: bytes) -> object:
    with catch_warnings():  # of the library, about serial numbers
        simplefilter("ignore", CryptographyDeprecationWarning)
        return decode_certificate(data)


TOKEN, LINE = new_token("alice", now_ms=NOW_MS, lifetime_ms=1_000)

ISSUER, AUDIENCE = "https://issuer.example", "shalekv"
KEY = Ed25519PrivateKey.generate()
KEYS = [WebKey("k1", frozenset({"EdDSA"}), KEY.public_key())]
CLAIMS = {"iss": ISSUER, "aud": [AUDIENCE], "sub": "alice", "exp": 2**31, "groups": ["ops", "x"]}
WEB_TOKEN = jwt.encode(CLAIMS, KEY, "EdDSA", {"kid": "k1"})
WEB_KEY = OKPAlgorithm.to_jwk(KEY.public_key(), as_dict=True) | {"kid": "k1"}
RSA_KEY = {"kty": "RSA", "n": "u" * 342 + "w", "e": "AQAB", "use": "sig"}
CURVE_KEY = {"kty": "EC", "crv": "P-256", "x": "A" * 43, "y": "A" * 43, "alg": "ES256"}


def _resealed(data: bytes) -> bytes:
    """Sign a forged token again."""
    signed, dot, _ = data.rpartition(b".")
    signature = urlsafe_b64encode(KEY.sign(signed)).rstrip(b"=")
    return signed + dot + signature if dot else data


def _web_token(data: bytes) -> object:
    token = parse_web_token(text_of(data), issuer=ISSUER, audience=AUDIENCE)
    return token.verify(KEYS, NOW_MS)


def _keys(data: bytes) -> object:
    return [(each.key_id, each.algorithms, each.key) for each in parse_keys(data)]


DECODERS = (
    Decoder(
        name="web token",
        covers=(parse_web_token,),
        decode=_web_token,
        samples=[WEB_TOKEN.encode()],
        errors=(Unauthenticated,),
        is_sealed=True,
        reseal=_resealed,
    ),
    Decoder(
        name="keys of an issuer",
        covers=(parse_keys, parse_document),
        decode=_keys,
        samples=[json.dumps({"keys": [WEB_KEY, RSA_KEY, CURVE_KEY]}).encode()],
        errors=(ValueError,),
        found=[b"[" * 100_000, b'{"keys": [{"kty": "RSA", "key_ops": 1}]}'],
    ),
    Decoder(
        name="client certificate",
        covers=(decode_certificate,),
        decode=_names_of,
        samples=[certificate_of("client.example.org", "10.0.0.1", "user@example.org")],
        errors=(Unauthenticated,),
    ),
    Decoder(
        name="static token",
        covers=(parse_token,),
        decode=lambda data: parse_token(text_of(data)),
        samples=[TOKEN.encode()],
        errors=(ValueError,),
        is_sealed=True,
    ),
    Decoder(
        name="token file",
        covers=(parse_tokens,),
        decode=lambda data: parse_tokens(text_of(data)),
        samples=[f"# comment\n\n{LINE.line()}\n".encode()],
        errors=(ValueError,),
    ),
)
