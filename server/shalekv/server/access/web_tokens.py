"""JSON web tokens of an OpenID Connect issuer: what is verified, and the identity that they prove.

Which algorithms count is decided here, not by a token: signatures with a key pair, and of each only
those that the type of the key allows. A key that is a secret, as HMAC has it, is never one of an
issuer. Keys come from the issuer alone; what a token says about them, but for the id, is ignored.

Times of a token are compared with the wall clock of this process: it counts until `exp`; a clock
that is behind the issuer's by `LEEWAY_MS` still accepts `nbf` and `iat`.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import structlog
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import (
    Algorithm,
    ECAlgorithm,
    OKPAlgorithm,
    RSAAlgorithm,
    get_default_algorithms,
)
from jwt.exceptions import PyJWTError

from shalekv.errors import Unauthenticated
from shalekv.protocol.access import Principal
from shalekv.server.access.certificates import is_name
from shalekv.server.access.identity import Identity
from shalekv.wording import MS_PER_S

RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
OF_CURVE: Mapping[str, str] = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
EDWARDS = "EdDSA"
RSA_BITS = range(2_048, 8_193)
TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})  # of tokens; others are for other uses
LEEWAY_MS = 60_000.0
TIME_S_MAX = 1 << 40
SUBJECTS_MAX = 128  # of claims; further ones do not count
KEYS_MAX = 128
KEYS_TRIED_MAX = 4  # for a token that names none
# These say nothing of a caller, or are checked here.
_OWN_CLAIMS = frozenset("iss sub aud exp nbf iat jti".split())

_COMPACT = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
_ALGORITHMS: Mapping[str, Algorithm] = {
    name: algorithm
    for name, algorithm in get_default_algorithms().items()
    if name in {*RSA, *OF_CURVE.values(), EDWARDS}
}

Document: TypeAlias = dict[str, Any]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class WebKey:
    """A public key of the issuer, as it was fetched. It is equal to itself alone."""

    key_id: str  # empty if it has none
    algorithms: frozenset[str]  # that its signatures may have
    key: RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey

    def is_same(self, other: WebKey) -> bool:
        """Return whether the issuer says the same of both."""
        ours, theirs = (self.key_id, self.algorithms), (other.key_id, other.algorithms)
        return ours == theirs and self.key == other.key


@dataclass(frozen=True, slots=True)
class WebToken:
    """A token for this server, whose signature and times were not verified yet."""

    key_id: str  # empty if it names none
    algorithm: str
    signed: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    principal: Principal
    not_before_ms: float
    expires_at_ms: float

    def fitting(self, keys: Iterable[WebKey]) -> list[WebKey]:
        """Return the keys that may have signed it: those of its id, or all if it names none."""
        return [
            each
            for each in keys
            if self.algorithm in each.algorithms and self.key_id in {"", each.key_id}
        ]

    def verify(self, keys: Iterable[WebKey], now_ms: float) -> Identity:
        """Return what the token proves, expired or not, if one of the keys has signed it.

        Raises `Unauthenticated`.
        """
        algorithm: Any = _ALGORITHMS[self.algorithm]
        for key in self.fitting(keys)[:KEYS_TRIED_MAX]:
            if algorithm.verify(self.signed, key.key, self.signature):
                break
        else:
            raise Unauthenticated("the signature of the token is not valid")
        if now_ms + LEEWAY_MS < self.not_before_ms:
            raise Unauthenticated("the token does not count yet, by its `nbf` or `iat`")
        return Identity(self.principal, self.expires_at_ms, key)


def parse_web_token(text: str, *, issuer: str, audience: str) -> WebToken:
    """Return a token of the issuer for the audience. Raises `Unauthenticated`."""
    if not _COMPACT.fullmatch(text):
        raise Unauthenticated("the token is neither a static nor a JSON web token")
    signed, _, signature = text.rpartition(".")
    head, _, body = signed.partition(".")
    header, claims = _document_of(head), _document_of(body)
    algorithm, key_id = header.get("alg"), header.get("kid", "")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise Unauthenticated(f"the token is not signed by one of {', '.join(_ALGORITHMS)}")
    if "crit" in header or "b64" in header or not isinstance(key_id, str):
        raise Unauthenticated("the token has a header that is not known here")
    if str(header.get("typ", "JWT")).lower() not in TYPES:
        raise Unauthenticated("the token is not one for access: its type is another")
    _check_parties(claims, issuer, audience)
    expires_s = _time_of(claims, "exp")
    if expires_s is None:
        raise Unauthenticated("the token has no `exp`")
    return WebToken(
        key_id,
        algorithm,
        signed.encode(),
        _bytes_of(signature),
        Principal(_principal_of(claims), _subjects_of(claims)),
        MS_PER_S * max(_time_of(claims, "nbf") or 0, _time_of(claims, "iat") or 0),
        MS_PER_S * expires_s,
    )


def parse_keys(document: bytes) -> Sequence[WebKey]:
    """Return the keys of a JWKS that verify signatures; others are left out. Raises ValueError."""
    found = parse_document(document).get("keys")
    if not isinstance(found, list) or len(found) > KEYS_MAX:
        raise ValueError(f"its keys are not a list of {KEYS_MAX} at most")
    keys = (_key_of(each) for each in found if isinstance(each, dict))
    return [key for key in keys if key is not None]


def parse_document(data: bytes) -> Document:
    """Return an object of JSON. Raises ValueError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("it is not an object of JSON")  # noqa: TRY004
    return found


def _key_of(jwk: Document) -> WebKey | None:
    """Return a public key; None for one that is not for verifying signatures."""
    try:
        if jwk.get("use", "sig") != "sig" or "verify" not in jwk.get("key_ops", ["verify"]):
            return None
        key, algorithms = _public_key_of({n: value for n, value in jwk.items() if n != "d"})
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if "alg" in jwk:
        algorithms &= {str(jwk["alg"])}
    key_id = jwk.get("kid", "")
    return WebKey(key_id, algorithms, key) if algorithms and isinstance(key_id, str) else None


def _public_key_of(jwk: Document) -> tuple[Any, frozenset[str]]:
    """Return a key with the algorithms that its type allows."""
    match jwk.get("kty"):
        case "RSA":
            key: Any = RSAAlgorithm.from_jwk(jwk)
            is_fit = key.key_size in RSA_BITS
            return key, frozenset(RSA if is_fit else ())
        case "EC":
            key = ECAlgorithm.from_jwk(jwk)
            name = OF_CURVE.get(key.curve.name)
            return key, frozenset({name} if name else ())
        case "OKP":
            key = OKPAlgorithm.from_jwk(jwk)
            return key, frozenset({EDWARDS} if isinstance(key, Ed25519PublicKey) else ())
        case _:
            return None, frozenset()


def _document_of(part: str) -> Document:
    try:
        return parse_document(_bytes_of(part))
    except ValueError:
        raise Unauthenticated("the token is damaged: it is not JSON") from None


def _bytes_of(part: str) -> bytes:
    try:
        return urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except ValueError:
        raise Unauthenticated("the token is damaged: it is not in base64url") from None


def _time_of(claims: Document, name: str) -> float | None:
    """Return a time in seconds; None: there is none."""
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= TIME_S_MAX:
        raise Unauthenticated(f"the token has no valid `{name}`")
    return float(value)


def _check_parties(claims: Document, issuer: str, audience: str) -> None:
    if claims.get("iss") != issuer:
        raise Unauthenticated("the token is of another issuer")
    named = claims.get("aud")
    if audience not in (named if isinstance(named, list) else [named]):
        raise Unauthenticated("the token is for another audience")


def _principal_of(claims: Document) -> str:
    subject = claims.get("sub")
    if not isinstance(subject, str) or not subject or not is_name(subject):
        raise Unauthenticated("the token has no valid `sub`")
    return f"oidc:{subject}"


def _subjects_of(claims: Document) -> frozenset[str]:
    subjects = list(_claim_subjects(claims))
    if len(subjects) > SUBJECTS_MAX:
        _log.warning("claims of a token left out", claims=len(subjects), counted=SUBJECTS_MAX)
    return frozenset(subjects[:SUBJECTS_MAX])


def _claim_subjects(claims: Document) -> Iterator[str]:
    """Yield the claims that are texts, or lists of them, as subjects.

    A name with `=` is left out: it would be that of another claim, with another value.
    """
    for name, value in claims.items():
        if name in _OWN_CLAIMS or "=" in name or not is_name(name):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and is_name(each):
                yield f"claim:{name}={each}"
