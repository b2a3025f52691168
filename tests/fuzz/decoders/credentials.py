"""Credentials of callers, and the files of tokens."""

from __future__ import annotations

from warnings import catch_warnings, simplefilter

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.utils import CryptographyDeprecationWarning
from trustme import CA

from shalekv.errors import Unauthenticated
from shalekv.server.access.certificates import decode_certificate
from shalekv.server.access.tokens import new_token, parse_token, parse_tokens
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

DECODERS = (
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
