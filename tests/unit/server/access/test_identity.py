"""Identities by static tokens and certificates, and the back-off of peers that guess."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from shalekv.clock import Clock
from shalekv.errors import InvalidSetting, Unauthenticated
from shalekv.protocol.access import ANONYMOUS, Principal
from shalekv.server.access import tokens
from shalekv.server.access.authenticator import (
    FREE,
    LONGEST_MS,
    PEERS_MAX,
    Authenticator,
    network_of,
)
from shalekv.server.access.identity import Credentials, Identity
from shalekv.server.access.tokens import HEADING, StaticToken, new_token, parse_token
from shalekv.settings import AccessSettings
from tests.kit.certificates import Authority
from tests.kit.constants import constants
from tests.kit.inline_runtime import InlineClock, MovedClock, inline_runtime
from tests.kit.timeouts import until

PEER = "ipv4:10.0.0.1:1234"
NOW_MS = 1_700_000_000_000
AUTHORITY = Authority()
OFTEN = {"shalekv.server.access.authenticator:FILE_INTERVAL_MS": 5.0}


def write(path: Path, *lines: StaticToken) -> None:
    """Replace a token file, as the command does."""
    text = "\n".join([HEADING, *(each.line() for each in lines), ""])
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def open_at(path: Path, clock: Clock | None = None) -> Authenticator:
    settings = AccessSettings(tokens_file=str(path))
    return Authenticator(settings, inline_runtime(7, clock or MovedClock()))


@asynccontextmanager
async def running(authenticator: Authenticator) -> AsyncIterator[None]:
    with constants(OFTEN):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(authenticator.run())
            try:
                yield
            finally:
                task.cancel()


def identity_of(authenticator: Authenticator, token: str, peer: str = PEER) -> Identity:
    found = authenticator.identify(Credentials(peer, authorization=f"Bearer {token}"))
    assert isinstance(found, Identity)
    return found


def refusal_of(authenticator: Authenticator, value: str, peer: str = PEER) -> Unauthenticated:
    with pytest.raises(Unauthenticated) as raised:
        authenticator.identify(Credentials(peer, authorization=value))
    return raised.value


def guess(authenticator: Authenticator, peer: str = PEER) -> Unauthenticated:
    """Try a token that is well-formed and unknown."""
    return refusal_of(authenticator, f"Bearer {new_token('x', now_ms=NOW_MS)[0]}", peer)


def changed(text: str, at: int) -> str:
    """Return a token with another letter in a place."""
    other = "a" if text[at] != "a" else "b"
    return text[:at] + other + text[at + 1 :]


def test_a_token_proves_the_name_of_its_line(tmp_path: Path) -> None:
    """Both tokens of a name prove it, as an id and a time say; the scheme is in any case."""
    (one, first), (other, second) = (new_token("alice", now_ms=NOW_MS) for _ in range(2))
    write(tmp_path / "tokens", first, second)
    authenticator = open_at(tmp_path / "tokens")
    for each in (one, other):
        found = authenticator.identify(Credentials(PEER, authorization=f"bEARER {each}"))
        assert isinstance(found, Identity)
        assert found.principal == Principal("token:alice")
        assert authenticator.is_valid(found)


def test_a_token_counts_before_a_certificate(tmp_path: Path) -> None:
    """A certificate does not save a call with a token that is not valid."""
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    authenticator = open_at(tmp_path / "tokens")
    certificate = AUTHORITY.issue("client.example.org").der
    found = authenticator.identify(Credentials(PEER, certificate, f"Bearer {text}"))
    assert isinstance(found, Identity)
    assert found.principal.name == "token:alice"
    with pytest.raises(Unauthenticated):
        authenticator.identify(Credentials(PEER, certificate, "Bearer wrong"))
    assert authenticator.identify(Credentials(PEER)) == Identity(ANONYMOUS)


def test_a_mistyped_token_is_told_from_an_unknown_one(tmp_path: Path) -> None:
    """Any changed letter fails the checksum; a token of another file is not known."""
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    authenticator = open_at(tmp_path / "tokens")
    for at in range(len(tokens.PREFIX), len(text)):
        with pytest.raises(ValueError, match=r"checksum|form"):
            parse_token(changed(text, at))
    assert "damaged" in str(refusal_of(authenticator, f"Bearer {text[:-1]}"))
    assert str(guess(authenticator)) == "the token is not known"


def test_the_id_alone_proves_nothing(tmp_path: Path) -> None:
    """A token with a known id, a right checksum and another secret is refused."""
    text, line = new_token("alice", now_ms=NOW_MS)
    other, _ = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    begin, secret = text.rpartition("_")[0], other.rpartition("_")[2][: tokens.SECRET_CHARS]
    forged = f"{begin}_{secret}"
    forged += tokens._check_of(forged)  # noqa: SLF001 - what anybody can compute
    assert parse_token(forged) == line.token_id
    assert str(refusal_of(open_at(tmp_path / "tokens"), f"Bearer {forged}")) == (
        "the token is not known"
    )


def test_an_unknown_id_costs_what_a_wrong_secret_costs(tmp_path: Path) -> None:
    """The same functions are called for both, so the time does not tell which ids exist."""
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    file = tokens.TokenFile(str(tmp_path / "tokens"))
    unknown, _ = new_token("alice", now_ms=NOW_MS)
    wrong = f"{text.rpartition('_')[0]}_{unknown.rpartition('_')[2][: tokens.SECRET_CHARS]}"
    wrong += tokens._check_of(wrong)  # noqa: SLF001 - as above
    assert calls_of(file, wrong) == calls_of(file, unknown)
    assert "compare_digest" in calls_of(file, unknown)


def calls_of(file: tokens.TokenFile, text: str) -> list[str]:
    """Return the functions that are called for a token that is refused.

    The collector of garbage is off: what it calls back would be among them.
    """
    called: list[str] = []

    def note(_frame: object, event: str, function: object) -> None:
        if event == "c_call":
            called.append(getattr(function, "__name__", ""))

    gc.disable()
    sys.setprofile(note)
    try:
        file.identify(text)
    except Unauthenticated:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return called


def test_tokens_expire(tmp_path: Path) -> None:
    """A token counts until the time of its line, and is no guess after it."""
    clock = MovedClock()
    now_ms = (clock.wall_ms() or 0) // 1_000 * 1_000
    text, line = new_token("alice", now_ms=now_ms, lifetime_ms=60_000)
    write(tmp_path / "tokens", line)
    authenticator = open_at(tmp_path / "tokens", clock)
    found = identity_of(authenticator, text)
    clock.ahead_ms = 61_000
    assert not authenticator.is_valid(found)
    for _ in range(50):
        assert str(refusal_of(authenticator, f"Bearer {text}")) == "the token has expired"


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Added tokens count and removed ones don't, nor what they have proven; others stay valid."""
    (kept, of_kept), (gone, of_gone), (new, of_new) = (
        new_token(name, now_ms=NOW_MS) for name in ("kept", "gone", "new")
    )
    path = tmp_path / "tokens"
    write(path, of_kept, of_gone)
    authenticator = open_at(path)
    async with running(authenticator):
        stays, ends = (identity_of(authenticator, each) for each in (kept, gone))
        write(path, of_kept, of_new)
        await until(lambda: not authenticator.is_valid(ends), "the new file")
        assert authenticator.is_valid(stays)
        assert identity_of(authenticator, new).principal.name == "token:new"
        assert str(refusal_of(authenticator, f"Bearer {gone}")) == "the token is not known"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("secret words", "line 2: not five words"),
        ("{id} alice {digest} 2023-11-14T22:13:20Z", "line 2: not five words"),
        ("{id}x alice {digest} 2023-11-14T22:13:20Z never", "line 2: the id"),
        ("{id} al:ce {digest} 2023-11-14T22:13:20Z never", "line 2: the name"),
        ("{id} alice {digest}0 2023-11-14T22:13:20Z never", "line 2: the SHA-256"),
        ("{id} alice {digest} 2023-11-14 never", "line 2: a time"),
        ("{id} alice {digest} 2023-11-14T22:13:20Z 2023-02-31T00:00:00Z", "line 2: a time"),
        ("{id} alice {digest} 2023-11-14T22:13:20Z sécret", "line 2: not ASCII"),
        ("{line}\n{line}", "line 3: another line has the same id"),
        ("", "is a directory"),
        ("", "no such file"),
    ],
)
async def test_a_damaged_file_is_not_used(damage: str, said: str, tmp_path: Path) -> None:
    """The last good file counts; the log has the number of the line, once, and not its content."""
    text, line = new_token("alice", now_ms=NOW_MS)
    path = tmp_path / "tokens"
    write(path, line)
    authenticator = open_at(path)
    words = damage.format(id=line.token_id, digest=line.digest.hex(), line=line.line())
    with capture_logs() as logs:
        async with running(authenticator):
            path.unlink()
            if said == "is a directory":
                path.mkdir()
            elif damage:
                path.write_text(f"{HEADING}\n{words}\n")
            await until(lambda: logs, "a look at the damaged file")
            assert identity_of(authenticator, text).principal.name == "token:alice"
            with pytest.raises(InvalidSetting, match="--tokens-file"):
                open_at(path)
            if path.is_dir():
                path.rmdir()
            _, added = new_token("bob", now_ms=NOW_MS)
            write(path, line, added)
            await until(lambda: len(logs) > 1, "a look at the good file")
    assert [each["event"] for each in logs] == ["token file not used", "token file read again"]
    assert said in logs[0]["problem"].lower() or said in logs[0]["problem"]
    shown = str(logs)
    assert not any(part in shown for part in (line.digest.hex(), "secret words", "sécret", "al:ce"))


@pytest.mark.parametrize(
    "value",
    [
        "Basic YWxpY2U6c2VjcmV0",
        "Bearer",
        "Bearer ",
        "YWxpY2U6c2VjcmV0",
        " Bearer YWxpY2U6c2VjcmV0",
        "Bearer  YWxpY2U6c2VjcmV0",
        "Bearer YWxpY2U6 c2VjcmV0",
        "Bearer YWxpY2U6c2VjcmV0\n",
        "Bearer YWxpY2U6séc",
        "Bearer YWxpY2U6\udcff",
        "Bearer YWxpY2U6\x00",
        "Bearer " + "YWxpY2U6" * 2_000,
        "Bearer YWxpY2U6.c2VjcmV0.YWxpY2U6",
        "Bearer shalekv_YWxpY2U6",
    ],
)
def test_malformed_values_are_refused_without_showing_them(value: str, tmp_path: Path) -> None:
    """Another scheme, nothing, what is not ASCII, and what is huge end in a clear text."""
    write(tmp_path / "tokens")
    with capture_logs() as logs:
        for authenticator in (
            open_at(tmp_path / "tokens"),
            Authenticator(AccessSettings(), inline_runtime(7, MovedClock())),
        ):
            error = refusal_of(authenticator, value)
            assert "token" in str(error) or "authorization" in str(error)
            shown = f"{error!r} {error.__cause__!r} {logs}"
            assert not any(part in shown for part in ("YWxpY2U6", "c2VjcmV0", "séc"))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """Neither what describes a call or a token, nor logs or errors show a part of a secret."""
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    with capture_logs() as logs:
        authenticator = open_at(tmp_path / "tokens")
        shown = [
            repr(Credentials(PEER, authorization=f"Bearer {text}")),
            repr(line),
            repr(identity_of(authenticator, text)),
        ]
        write(tmp_path / "other")
        stranger = open_at(tmp_path / "other")
        shown += [repr(refusal_of(stranger, f"Bearer {text}")) for _ in range(FREE + 2)]
        shown.append(repr(vars(stranger)))
    assert logs  # about the failures
    secret = text.rpartition("_")[2]
    for each in (*shown, str(logs)):
        assert not any(secret[at : at + 8] in each for at in range(0, 48, 8))
        assert line.digest.hex() not in each


def test_names_of_certificates() -> None:
    """The first URI names the principal, else the first DNS name; the others are subjects."""
    authenticator = Authenticator(AccessSettings(), inline_runtime(7, MovedClock()))

    def principal(der: bytes) -> Principal:
        found = authenticator.identify(Credentials(PEER, der))
        assert isinstance(found, Identity)
        assert authenticator.is_valid(found)
        return found.principal

    uris = ("spiffe://example.org/a", "urn:b")
    both = AUTHORITY.issue("A.example.org", "10.0.0.1", "b.example.org", uris=uris)
    assert principal(both.der) == Principal(
        "uri:spiffe://example.org/a",
        frozenset({"uri:urn:b", "dns:a.example.org", "dns:b.example.org"}),
    )
    hosts = AUTHORITY.issue("A.example.org", "b.example.org", common_name="admin")
    assert principal(hosts.der) == Principal("dns:a.example.org", frozenset({"dns:b.example.org"}))
    assert principal(AUTHORITY.issue(common_name="alice").der) == Principal("cn:alice")


def test_certificates_without_a_good_name_are_refused() -> None:
    """So are those with names that cannot be printed, or are long, many, or only an address."""
    authenticator = Authenticator(AccessSettings(), inline_runtime(7, MovedClock()))
    for certificate in (
        AUTHORITY.issue("10.0.0.1", common_name="alice").der,  # no fallback to the common name
        AUTHORITY.issue().der,
        AUTHORITY.issue(common_name="a\x00b").der,
        AUTHORITY.issue(common_name="a\u202eb").der,
        AUTHORITY.issue(uris=["urn:a\nb"]).der,
        AUTHORITY.issue(uris=["urn:" + "x" * 1_024]).der,
        AUTHORITY.issue(*(f"h{number}.example.org" for number in range(129))).der,
        b"not a certificate",
        AUTHORITY.issue("a.example.org").der[:-1],
        b"\x30" * 70_000,
    ):
        with pytest.raises(Unauthenticated, match="certificate"):
            authenticator.identify(Credentials(PEER, certificate))


def test_a_certificate_proves_a_name_until_it_expires() -> None:
    """An identity ends with its certificate, on a connection that goes on as well."""
    clock = MovedClock()
    authenticator = Authenticator(AccessSettings(), inline_runtime(7, clock))
    certificate = AUTHORITY.issue("a.example.org", valid=(-1, 1)).der
    found = authenticator.identify(Credentials(PEER, certificate))
    assert isinstance(found, Identity)
    expires = x509.load_der_x509_certificate(certificate).not_valid_after_utc
    assert found.expires_at_ms == expires.timestamp() * 1_000
    clock.ahead_ms = 86_400_001
    assert not authenticator.is_valid(found)
    with pytest.raises(Unauthenticated, match="expired"):
        authenticator.identify(Credentials(PEER, certificate))


def test_a_peer_that_guesses_has_to_wait(tmp_path: Path) -> None:
    """After some failures nothing of a peer is looked at for a time, which doubles; another port
    is the same peer, another address is not.
    """
    clock = InlineClock()
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    authenticator = open_at(tmp_path / "tokens", clock)
    assert [guess(authenticator).retry_after_ms for _ in range(FREE)] == [0] * FREE
    waits = []
    for _ in range(12):
        assert guess(authenticator).retry_after_ms == 0  # it is looked at
        waits.append(wait_of(authenticator))
        clock.waits_ms.append(waits[-1])
    assert all(0.9 <= later / sooner < 2.1 for sooner, later in pairwise(waits))
    assert waits[0] < 400
    assert waits[-1] == LONGEST_MS
    assert identity_of(authenticator, text, "ipv4:10.0.0.2:9").principal.name == "token:alice"


def wait_of(authenticator: Authenticator, peer: str = "ipv4:10.0.0.1:99") -> float:
    """Return the advice that a peer gets, whatever it sends; some are looked at all the same."""
    while not (advice := refusal_of(authenticator, "Bearer x", peer).retry_after_ms):
        pass
    return advice


def test_a_refusal_tells_nothing_about_the_credentials(tmp_path: Path) -> None:
    """While a peer has to wait, right and wrong credentials get the same answer."""
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    authenticator = open_at(tmp_path / "tokens", InlineClock())
    for _ in range(FREE + 1):
        guess(authenticator)
    with constants({"shalekv.server.access.authenticator:LUCKY": 10**9}):
        for value in (f"Bearer {text}", "Bearer x", "Basic x", f"Bearer {text[:-1]}"):
            error = refusal_of(authenticator, value)
            assert "were not valid, too often" in str(error)
            assert error.retry_after_ms > 0


def test_nobody_is_locked_out_for_ever(tmp_path: Path) -> None:
    """However often others behind its address fail, a caller gets through after some attempts."""
    text, line = new_token("alice", now_ms=NOW_MS)
    write(tmp_path / "tokens", line)
    authenticator = open_at(tmp_path / "tokens", InlineClock())
    attempts = 0
    while True:
        for _ in range(FREE + 3):
            guess(authenticator)
        attempts += 1
        try:
            identity_of(authenticator, text)
        except Unauthenticated as error:
            assert error.retry_after_ms > 0  # noqa: PT017 - success is the other way out
        else:
            break
    assert 1 < attempts < 200
    # Success has forgiven the failures.
    assert [guess(authenticator).retry_after_ms for _ in range(FREE)] == [0] * FREE


def test_failures_are_forgiven_with_time(tmp_path: Path) -> None:
    """Ten minutes after any number of failures a peer has its free attempts again."""
    clock = InlineClock()
    write(tmp_path / "tokens")
    authenticator = open_at(tmp_path / "tokens", clock)
    with constants({"shalekv.server.access.authenticator:LUCKY": 1}):  # all are looked at
        for _ in range(300):
            guess(authenticator)
    clock.waits_ms.append(10 * 60_000)
    assert [guess(authenticator).retry_after_ms for _ in range(FREE)] == [0] * FREE


def test_the_table_of_failures_is_bounded(tmp_path: Path) -> None:
    """Any number of peers take the place of those that have failed longest ago."""
    write(tmp_path / "tokens")
    authenticator = open_at(tmp_path / "tokens")
    for number in range(PEERS_MAX + 500):
        refusal_of(authenticator, "Bearer x", f"ipv4:10.{number >> 8}.{number & 255}.1:5")
    failures = authenticator._failures  # noqa: SLF001 - its size cannot be seen from outside
    assert len(failures._of) == PEERS_MAX  # noqa: SLF001 - as above


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:10.1.2.3:4567", "10.1.2.3"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:7", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:7", "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:10.1.2.3]:7", "10.1.2.3"),
        ("ipv6:[fe80::1%25eth0]:7", "fe80::/64"),
        ("ipv6:[::1]:7", "::/64"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_a_peer_is_its_address(peer: str, network: str) -> None:
    """A port is left out; of an IPv6 address, what one user has of it."""
    assert network_of(peer) == network
