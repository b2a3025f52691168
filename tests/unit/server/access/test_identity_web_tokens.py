"""Web tokens of an issuer on a real socket: which count, and what becomes of its keys."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import get_default_algorithms
from structlog.testing import capture_logs

from shalekv.errors import InvalidSetting, IssuerUnavailable, ShaleError, Unauthenticated
from shalekv.protocol.access import Principal
from shalekv.server.access.authenticator import Authenticator
from shalekv.server.access.identity import Credentials, Identity
from shalekv.server.access.issuer import check_issuer_url
from shalekv.settings import AccessSettings
from tests.kit.constants import constants
from tests.kit.inline_runtime import MovedClock, inline_runtime
from tests.kit.serving.token_issuer import (
    AUDIENCE,
    PrivateKey,
    TokenIssuer,
    compressed,
    elsewhere,
    megabytes,
    private_key,
    public_jwk,
    serving,
    silence,
    token_issuer,
)
from tests.kit.timeouts import until
from tests.servers.process import free_port

ISSUER = "shalekv.server.access.issuer:"
PEER = "ipv4:10.0.0.1:1234"
PEM = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
ALGORITHMS = "RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 ES512 EdDSA".split()


def settings_of(issuer: TokenIssuer) -> AccessSettings:
    return AccessSettings(oidc_issuer=issuer.url, oidc_audience=AUDIENCE, oidc_ca=issuer.ca)


@asynccontextmanager
async def running(
    issuer: TokenIssuer, clock: MovedClock | None = None
) -> AsyncIterator[Authenticator]:
    """An authenticator that keeps the keys of the issuer."""
    authenticator = Authenticator(settings_of(issuer), inline_runtime(clock=clock or MovedClock()))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(authenticator.run())
        try:
            yield authenticator
        finally:
            task.cancel()


async def identity_of(authenticator: Authenticator, token: str, peer: str = PEER) -> Identity:
    found = authenticator.identify(Credentials(peer, authorization=f"Bearer {token}"))
    return await found if isinstance(found, Awaitable) else found


async def refusal_of(authenticator: Authenticator, token: str, peer: str = PEER) -> ShaleError:
    """Return the error for a token, which shows no part of it."""
    with pytest.raises(ShaleError) as raised:
        await identity_of(authenticator, token, peer)
    for part in token.split("."):
        assert len(part) < 8 or part not in str(raised.value)
    return raised.value


def forged(header: Mapping[str, Any], claims: Mapping[str, Any], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(each).rstrip(b"=").decode() for each in parts)


async def test_a_valid_token_proves_its_subject_and_claims(tmp_path: Path) -> None:
    """The subject names the principal; texts and lists of texts among the claims are subjects."""
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        token = issuer.token(
            exp=2**32, groups=["ops", "dev", 7, "bad\n"], team="core", admin=True, **{"a=b": "c"}
        )
        found = await identity_of(authenticator, token)
        assert found.principal == Principal(
            "oidc:alice", frozenset({"claim:groups=ops", "claim:groups=dev", "claim:team=core"})
        )
        assert found.expires_at_ms == 2**32 * 1_000
        assert authenticator.is_valid(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_signatures_of_key_pairs_count(algorithm: str, tmp_path: Path) -> None:
    """A token counts if it is signed by any of the algorithms with a key of the issuer."""
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        key = private_key(algorithm)
        issuer.keys = [public_jwk(algorithm, key, kid="k", use="sig", alg=algorithm)]
        token = jwt.encode(issuer.claims(), key, algorithm, {"kid": "k"})
        assert (await identity_of(authenticator, token)).principal.name == "oidc:alice"
        other = private_key(algorithm, 1)
        error = await refusal_of(
            authenticator, jwt.encode(issuer.claims(), other, algorithm, {"kid": "k"})
        )
        assert str(error) == "the signature of the token is not valid"


async def test_algorithms_are_not_confused(tmp_path: Path) -> None:
    """No token without a signature, with one of a secret, or with one that does not fit the key."""
    rsa, curve = private_key("RS256"), private_key("ES256")
    short = private_key("RS256", 0, 1_024)
    jwk = public_jwk("RS256", rsa, kid="k")
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        issuer.keys = [
            jwk,
            public_jwk("ES256", curve, kid="c"),
            public_jwk("RS256", rsa, kid="only-256", alg="RS256"),
            {"kty": "oct", "kid": "secret", "k": base64.urlsafe_b64encode(b"s" * 32).decode()},
            public_jwk("RS256", rsa, kid="for-encryption", use="enc"),
            public_jwk("RS256", short, kid="short"),
        ]
        claims = issuer.claims()
        await identity_of(authenticator, jwt.encode(claims, rsa, "RS256", {"kid": "k"}))
        public = rsa.public_key().public_bytes(*PEM)
        refused = {
            "empty signature": forged({"alg": "none", "kid": "k"}, claims),
            "unsigned": forged({"alg": "none", "kid": "k"}, claims, b"x"),
            "None": forged({"alg": "None", "kid": "k"}, claims, b"x"),
            "no algorithm": forged({"kid": "k"}, claims, b"x"),
            "HMAC by the public key": _with_secret({"alg": "HS256", "kid": "k"}, claims, public),
            "HMAC by a secret key": _with_secret(
                {"alg": "HS256", "kid": "secret"}, claims, b"s" * 32
            ),
            "curve with a key of RSA": jwt.encode(claims, curve, "ES256", {"kid": "k"}),
            "RSA with a key of a curve": jwt.encode(claims, rsa, "RS256", {"kid": "c"}),
            "another algorithm than the key's": jwt.encode(
                claims, rsa, "PS256", {"kid": "only-256"}
            ),
            "a short key": _signed({"alg": "RS256", "kid": "short"}, claims, short),
            "a key for encryption": jwt.encode(claims, rsa, "RS256", {"kid": "for-encryption"}),
            "another curve": jwt.encode(claims, private_key("ES384"), "ES384", {"kid": "c"}),
            "a key in the token": jwt.encode(
                claims,
                private_key("ES256", 1),
                "ES256",
                {"kid": "mine", "jwk": public_jwk("ES256", private_key("ES256", 1))},
            ),
            "a key at a URL": jwt.encode(
                claims, private_key("ES256", 1), "ES256", {"kid": "mine", "jku": issuer.url}
            ),
            "a critical header": jwt.encode(
                claims, rsa, "RS256", {"kid": "k", "crit": ["x"], "x": 1}
            ),
            "a token for logging out": jwt.encode(
                claims, rsa, "RS256", {"kid": "k", "typ": "logout+jwt"}
            ),
        }
        for number, (what, token) in enumerate(refused.items()):
            error = await refusal_of(authenticator, token, f"ipv4:10.0.1.{number}:1")
            assert isinstance(error, Unauthenticated), what
            is_unknown = what.startswith(("unsigned", "None", "no ", "HMAC"))
            assert ("not signed by one of RS256, " in str(error)) == is_unknown, what


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"iss": "https://other.example"}, "of another issuer"),
        ({"iss": None}, "of another issuer"),
        ({"aud": "other"}, "for another audience"),
        ({"aud": ["other", ""]}, "for another audience"),
        ({"aud": None}, "for another audience"),
        ({"exp": None}, "has no `exp`"),
        ({"exp": "soon"}, "no valid `exp`"),
        ({"exp": True}, "no valid `exp`"),
        ({"exp": 10**400}, "no valid `exp`"),
        ({"exp": float("inf")}, "no valid `exp`"),
        ({"nbf": float("nan")}, "no valid `nbf`"),
        ({"exp": -1}, "no valid `exp`"),
        ({"sub": None}, "no valid `sub`"),
        ({"sub": "a\nb"}, "no valid `sub`"),
        ({"sub": "a\u202eb"}, "no valid `sub`"),
        ({"sub": "x" * 1_025}, "no valid `sub`"),
    ],
)
async def test_claims_have_to_fit(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A token names this issuer, this server and a subject, and says when it expires."""
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        head = {"alg": "EdDSA", "kid": "k1"}
        token = _signed(head, issuer.claims(**changed), private_key("EdDSA", 1))
        error = await refusal_of(authenticator, token)
        assert isinstance(error, Unauthenticated)
        assert said in str(error)


async def test_times_are_those_of_the_wall_clock(tmp_path: Path) -> None:
    """A token counts until it expires, and from a minute before it should on, for slow clocks."""
    clock = MovedClock()
    async with token_issuer(tmp_path) as issuer, running(issuer, clock) as authenticator:
        now_s = (clock.wall_ms() or 0) // 1_000
        found = await identity_of(authenticator, issuer.token(exp=now_s + 600, nbf=now_s + 55))
        assert authenticator.is_valid(found)
        error = await refusal_of(authenticator, issuer.token(iat=now_s + 90))
        assert "does not count yet" in str(error)
        clock.ahead_ms = 601_000
        assert not authenticator.is_valid(found)
        error = await refusal_of(authenticator, issuer.token(exp=now_s + 600))
        assert str(error) == "the token has expired"


async def test_too_many_claims_are_cut(tmp_path: Path) -> None:
    """Of the claims of a token the first 128 count, and the log says that there were more."""
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        token = issuer.token(groups=[f"g{number}" for number in range(200)])
        with capture_logs() as logs:
            found = await identity_of(authenticator, token)
        assert len(found.principal.others) == 128
        assert "claim:groups=g127" in found.principal.others
        assert any(line.get("claims") == 200 for line in logs)


async def test_a_new_key_counts_at_once(tmp_path: Path) -> None:
    """A token that names an unknown key makes the keys be fetched, while the call waits."""
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        with constants({ISSUER + "ASKED_INTERVAL_MS": 0.0}):
            old = await identity_of(authenticator, issuer.token("k1"))
            issuer.rotate("k1", "k2")
            await identity_of(authenticator, issuer.token("k2"))
            assert authenticator.is_valid(old)
            issuer.rotate("k2", "k3")
            await identity_of(authenticator, issuer.token("k3"))
            assert not authenticator.is_valid(old)  # its key was withdrawn
            assert "no key that fits" in str(await refusal_of(authenticator, issuer.token("k1")))


async def test_unknown_keys_cause_few_requests(tmp_path: Path) -> None:
    """Any number of tokens that name unknown keys cause one request in some time."""
    clock, interval_ms = MovedClock(), 600_000.0
    with constants({ISSUER + "ASKED_INTERVAL_MS": interval_ms}):
        async with token_issuer(tmp_path) as issuer, running(issuer, clock) as authenticator:
            await identity_of(authenticator, issuer.token())
            assert issuer.fetches == 1
            clock.ahead_ms += interval_ms + 1
            tokens = [issuer.token(f"k{number}") for number in range(2, 202)]
            for network in ("10.1.0", "10.1.1", "10.1.2"):
                errors = await asyncio.gather(
                    *(
                        refusal_of(authenticator, token, f"ipv4:{network}.{number}:1")
                        for number, token in enumerate(tokens)
                    )
                )
                assert {type(error) for error in errors} == {Unauthenticated}
                assert issuer.fetches == 2
            await identity_of(authenticator, issuer.token())


async def test_few_calls_wait_for_keys(tmp_path: Path) -> None:
    """Calls that wait for the keys of an issuer that does not answer are bounded in number."""
    bounds = {ISSUER + "WAITING_MAX": 3, ISSUER + "REQUEST_S": 0.2}
    with constants(bounds):
        async with token_issuer(tmp_path) as issuer:
            issuer.answer = silence
            async with running(issuer) as authenticator:
                errors = await asyncio.gather(
                    *(refusal_of(authenticator, issuer.token(jti=str(n))) for n in range(5))
                )
                assert {type(error) for error in errors} == {IssuerUnavailable}
                assert sum("too many" in str(error) for error in errors) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (megabytes, "is larger than"),
        (compressed, "cannot be used: it is not JSON"),
        (silence, "not in time"),
        (elsewhere, "has answered 302"),
    ],
)
async def test_bad_answers_leave_the_keys_in_use(answer: Any, said: str, tmp_path: Path) -> None:
    """Keys stay in use while the issuer answers too much, too late, or elsewhere; logged once."""
    often = {ISSUER + "FRESH_S_MAX": 0.01, ISSUER + "RETRY_MS": 1.0}
    often[ISSUER + "REQUEST_S"] = 0.2 if answer is silence else 10.0
    with constants(often):
        async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
            await identity_of(authenticator, issuer.token())
            with capture_logs() as logs:
                issuer.answer = answer
                before = issuer.fetches
                await until(lambda: issuer.fetches > before + 2, "more attempts")
                await identity_of(authenticator, issuer.token(jti="another"))
            problems = [line["problem"] for line in logs if "problem" in line]
            assert len(problems) == 1
            assert said in problems[0]
            issuer.answer = None
            issuer.rotate("k2")
            await until(lambda: not _knows(authenticator, issuer.token("k1")), "the new keys")
            await identity_of(authenticator, issuer.token("k2"))


async def test_keys_count_for_hours_without_the_issuer(tmp_path: Path) -> None:
    """Without an issuer, its keys count until they are too old; then nothing can be verified."""
    clock = MovedClock()
    often = {ISSUER + "FRESH_S_MAX": 0.01, ISSUER + "RETRY_MS_MAX": 10.0}
    with constants(often):
        async with token_issuer(tmp_path) as issuer, running(issuer, clock) as authenticator:
            found = await identity_of(authenticator, issuer.token())
            issuer.configuration = {"issuer": "https://other.example"}
            before = issuer.requests.total()
            clock.ahead_ms = 3 * 3_600_000
            await until(lambda: issuer.requests.total() > before + 2, "more attempts")
            await identity_of(authenticator, issuer.token(jti="another"))
            clock.ahead_ms = 4 * 3_600_000
            await until(lambda: not authenticator.is_valid(found), "keys that are too old")
            error = await refusal_of(authenticator, issuer.token())
            assert isinstance(error, IssuerUnavailable)


async def test_an_issuer_may_come_later(tmp_path: Path) -> None:
    """Without keys a token is neither valid nor invalid; it is valid once the issuer answers."""
    soon = {ISSUER + "RETRY_MS": 10.0, ISSUER + "ASKED_INTERVAL_MS": 10_000.0}
    port = free_port()  # one that nobody gets meanwhile
    with constants(soon):
        async with token_issuer(tmp_path, port) as issuer:
            pass
        async with running(issuer) as authenticator:
            assert isinstance(await refusal_of(authenticator, issuer.token()), IssuerUnavailable)
            async with serving(issuer, port):
                await until(lambda: _knows(authenticator, issuer.token()), "the keys")


async def test_a_wrong_authority_is_not_trusted(tmp_path: Path) -> None:
    """The issuer is verified by the authorities of the setting."""
    (tmp_path / "other").mkdir()
    async with token_issuer(tmp_path) as issuer, token_issuer(tmp_path / "other") as other:
        issuer.ca = other.ca
        with capture_logs() as logs:
            async with running(issuer) as authenticator:
                assert isinstance(
                    await refusal_of(authenticator, issuer.token()), IssuerUnavailable
                )
        assert "certificate verify failed" in logs[0]["problem"]
        assert issuer.requests.total() == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://issuer.example",
        "https://",
        "https://user:password@issuer.example",
        "https://issuer.example/#x",
        "https://[::1",
        "https://issuer.example:port",
        "file:///etc/passwd",
        "http://127.0.0.1.example.org",
        "http://localhost@example.org",
        "https://issuer.example/\n",
    ],
)
def test_urls_of_issuers_have_https(url: str) -> None:
    """An issuer elsewhere has a URL with https, and without credentials."""
    with pytest.raises(InvalidSetting, match="oidc-issuer"):
        Authenticator(AccessSettings(oidc_issuer=url, oidc_audience=AUDIENCE), inline_runtime())


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080/x", "http://[::1]:80", "http://localhost"])
def test_urls_of_this_machine_may_have_http(url: str) -> None:
    """An issuer on this machine needs no TLS."""
    check_issuer_url(url)


async def test_keys_elsewhere_need_https(tmp_path: Path) -> None:
    """The configuration of an issuer cannot make the server ask a URL without https."""
    async with token_issuer(tmp_path) as issuer:
        issuer.configuration = {"jwks_uri": "http://issuer.example/keys"}
        with capture_logs() as logs:
            async with running(issuer) as authenticator:
                error = await refusal_of(authenticator, issuer.token())
        assert isinstance(error, IssuerUnavailable)
        assert "has not https" in logs[0]["problem"]


async def test_long_tokens_are_refused(tmp_path: Path) -> None:
    """A token of more than 8 KiB is refused before anything of it is read."""
    async with token_issuer(tmp_path) as issuer, running(issuer) as authenticator:
        error = await refusal_of(authenticator, issuer.token(x="y" * 8_192))
        assert "longer than" in str(error)


def _knows(authenticator: Authenticator, token: str) -> bool:
    """Return whether a token is valid by the keys that are here."""
    try:
        found = authenticator.identify(Credentials("unix:", authorization=f"Bearer {token}"))
    except ShaleError:
        return False
    if isinstance(found, Coroutine):  # it would wait for them
        found.close()
    return isinstance(found, Identity)


def _signed(header: Mapping[str, Any], claims: Mapping[str, Any], key: PrivateKey) -> str:
    signed = forged(header, claims).rpartition(".")[0]
    signature = get_default_algorithms()[header["alg"]].sign(signed.encode(), key)
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _with_secret(header: Mapping[str, Any], claims: Mapping[str, Any], secret: bytes) -> str:
    signed = forged(header, claims).rpartition(".")[0]
    digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
