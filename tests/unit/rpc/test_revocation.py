"""Revoked certificates over real sockets: who is refused, from when on, and what is logged."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509

from shalekv.errors import InvalidSetting
from shalekv.rpc.native_server import listening
from shalekv.rpc.revocation import read_lists
from shalekv.settings import Wire
from shalekv.settings.security import TlsSettings
from shalekv_wire.status import CallFailed
from shalekv_wire.tls import TlsContexts, TlsFiles
from tests.kit.certificates import LOCAL, Authority, Pair, greet
from tests.kit.constants import constants
from tests.kit.timeouts import scaled_timeout_s, until
from tests.unit.rpc.test_tls import ASK, EITHER_CLIENT, Open, ask, open_native, serving

CA, OTHER = Authority("first"), Authority("second")
SERVER = CA.issue(*LOCAL)
ALICE, BOB = CA.issue(uris=["test:alice"]), CA.issue(uris=["test:bob"])
CAROL = OTHER.issue(uris=["test:carol"])
EMPTY, OF_ALICE = CA.revoke(), CA.revoke(ALICE.certificate)
SECOND_S = 1 / 86_400  # in days
SETTLING_S = 1.5  # of the test that waits for it


@pytest.fixture(autouse=True)
def looking_at_once() -> Iterator[None]:
    """Look at the files for each connection, not once a second."""
    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 0}):
        yield


class Files:
    """The files of a server and of its clients; the test replaces that of their authorities."""

    def __init__(self, folder: Path, *blocks: bytes) -> None:
        self._folder = folder
        self._path = folder / "clients.pem"
        self.put(*blocks)
        self.server = replace(SERVER.write(folder, "server"), authority=str(self._path))
        self._trusted = CA.write(folder, "ca of the server")

    def put(self, *blocks: bytes) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(b"".join(blocks))
        new.replace(self._path)

    def put_in_place(self, *blocks: bytes) -> None:
        self._path.write_bytes(b"".join(blocks))

    def put_key(self, key: bytes) -> None:
        """Replace the key of the server."""
        Path(self.server.key).write_bytes(key)

    def of(self, pair: Pair) -> TlsFiles:
        name = f"client-{hash(pair.certificate)}"
        return replace(pair.write(self._folder, name), authority=self._trusted)

    def listening(self, wire: Wire = Wire.NATIVE) -> TlsContexts:
        found = listening(
            TlsSettings(
                tls_cert=self.server.certificate,
                tls_key=self.server.key,
                tls_client_ca=self.server.authority,
            ),
            wire,
        )
        assert found is not None
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, CA.certificate, OF_ALICE)


def soon() -> float:
    """Days until a moment that comes soon, and not before the test is ready for it."""
    return min(10.0, scaled_timeout_s(3)) * SECOND_S


def begin_and_end(listed: bytes) -> tuple[datetime, datetime]:
    """The times of a list, which has whole seconds."""
    found = x509.load_pem_x509_crl(listed)
    assert found.next_update_utc is not None
    return found.last_update_utc, found.next_update_utc


async def refusal(address: str, files: TlsFiles, opened: Open = open_native) -> str:
    with pytest.raises(CallFailed) as caught:
        await ask(opened(address, files))
    assert caught.value.is_unsent
    return caught.value.message


@EITHER_CLIENT
async def test_revoked_certificates_are_refused(files: Files, opened: Open) -> None:
    """No call of theirs arrives; others of the same authority are served."""
    async with serving(Wire.NATIVE, files.server) as (address, seen):
        why = await refusal(address, files.of(ALICE), opened)
        assert await ask(opened(address, files.of(BOB))) == b"question"
    assert seen.certificates == [BOB.der]
    if opened is open_native:
        assert "it was revoked" in why


async def test_list_counts_at_the_next_handshake(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a restart; connections go on, as after the removal of an authority."""
    caplog.set_level(logging.INFO)
    files.put(CA.certificate)
    async with serving(Wire.NATIVE, files.server) as (address, _):
        old = open_native(address, files.of(ALICE))
        assert await old.unary(ASK, b"before") == b"before"
        for listed, refused, served in ((ALICE, ALICE, BOB), (BOB, BOB, ALICE)):
            files.put(CA.certificate, CA.revoke(listed.certificate))
            assert "it was revoked" in await refusal(address, files.of(refused))
            assert await ask(open_native(address, files.of(served))) == b"question"
        assert not [each for each in caplog.records if each.levelname != "INFO"]
        files.put(CA.certificate)
        with constants({"shalekv_wire.tls:SETTLING_S": 0}):
            assert await ask(open_native(address, files.of(BOB))) == b"question"
        assert await ask(old) == b"question"
    warning, *others = [each for each in caplog.records if each.levelname != "INFO"]
    assert "has no lists of revoked certificates any more" in warning.getMessage()
    assert not others


@pytest.mark.parametrize("rest", [b"", b"-----"])
async def test_lists_that_are_not_written_yet_stay_in_use(
    files: Files, caplog: pytest.LogCaptureFixture, rest: bytes
) -> None:
    """A file without lists turns the check off when it has stayed the same for a while."""
    alice = files.of(ALICE)
    half = CA.certificate, rest

    async def is_refused() -> bool:
        try:
            await ask(open_native(address, alice))
        except CallFailed:
            return True
        return False

    async def settled() -> None:
        end_s = time.monotonic() + SETTLING_S
        await until(lambda: time.monotonic() > end_s, "the time after which files are taken")

    with constants({"shalekv_wire.tls:SETTLING_S": SETTLING_S}):
        async with serving(Wire.NATIVE, files.server) as (address, _):
            for _ in range(2):  # the time of the second half begins anew
                files.put_in_place(*half)
                assert await is_refused()
                files.put_in_place(CA.certificate, OF_ALICE)
                assert await is_refused()
                await settled()
            assert not caplog.records
            files.put_in_place(*half)
            assert await is_refused()
            await settled()
            assert not await is_refused()
    (warning,) = caplog.records
    assert "has no lists of revoked certificates any more" in warning.getMessage()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_session_is_not_resumed_with_a_revoked_certificate(
    files: Files, version: ssl.TLSVersion
) -> None:
    """Its certificate is shown again, and refused."""
    files.put(CA.certificate, EMPTY)
    context = TlsContexts(files.of(ALICE), is_server=False).current()
    context.maximum_version = context.minimum_version = version
    async with serving(Wire.NATIVE, files.server) as (address, _):
        session, _ = await asyncio.to_thread(greet, address, context, None)
        session, was_reused = await asyncio.to_thread(greet, address, context, session)
        assert was_reused
        files.put(CA.certificate, OF_ALICE)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REVOKED"):
            await asyncio.to_thread(greet, address, context, session)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_list_that_has_ended_refuses_all(
    files: Files, caplog: pytest.LogCaptureFixture, version: ssl.TLSVersion
) -> None:
    """From its end on, also for sessions from before, with a line; a new one serves again.

    The files, which cannot be used at that time, make no difference.
    """
    ending = CA.revoke(valid=(-1, soon()))
    _, end = begin_and_end(ending)
    files.put(CA.certificate, ending)
    context = TlsContexts(files.of(BOB), is_server=False).current()
    context.maximum_version = context.minimum_version = version
    async with serving(Wire.NATIVE, files.server) as (address, _):
        session, _ = await asyncio.to_thread(greet, address, context, None)
        files.put(CA.certificate[:-10])
        files.put_key(b"damaged")
        _, was_reused = await asyncio.to_thread(greet, address, context, session)
        assert was_reused
        await until(lambda: datetime.now(UTC) > end, "the end of the list")
        for _ in range(2):
            with pytest.raises(ssl.SSLError, match="ALERT"):
                await asyncio.to_thread(greet, address, context, session)
        before, damaged, after = [
            each for each in caplog.records if each.name == "shalekv_wire.tls"
        ]
        assert "needs another list" in before.getMessage()
        assert "cannot be used" in damaged.getMessage()
        assert after.levelname == "ERROR"
        assert "clients of an authority are refused" in after.getMessage()
        assert "'first'" in after.getMessage()
        files.put(CA.certificate, EMPTY)
        files.put_key(SERVER.key)
        await asyncio.to_thread(greet, address, context, session)


async def test_nobody_is_served_while_the_end_of_a_list_cannot_count(
    files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as without a descriptor; it is tried for each connection, and logged once."""
    ending = CA.revoke(valid=(-1, soon()))
    _, end = begin_and_end(ending)
    files.put(CA.certificate, OTHER.certificate, OTHER.revoke(), ending)
    bob, carol = (TlsContexts(files.of(each), is_server=False).current() for each in (BOB, CAROL))

    def fail(_name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 3_600}):
        async with serving(Wire.NATIVE, files.server) as (address, _):
            session, _ = await asyncio.to_thread(greet, address, bob, None)
            await asyncio.to_thread(greet, address, carol, None)
            with monkeypatch.context() as patch:
                patch.setattr(os, "memfd_create", fail)
                await until(lambda: datetime.now(UTC) > end, "the end of the list")
                for each in (bob, carol, bob):
                    with pytest.raises((ssl.SSLError, ConnectionError)):
                        await asyncio.to_thread(
                            greet, address, each, session if each is bob else None
                        )
            await asyncio.to_thread(greet, address, carol, None)
            with pytest.raises(ssl.SSLError, match="ALERT"):
                await asyncio.to_thread(greet, address, bob, session)
    _, nobody, ended = [each.getMessage() for each in caplog.records if "wire" in each.name]
    assert "all clients are refused" in nobody
    assert "Too many open files" in nobody
    assert "clients of an authority are refused" in ended


async def test_list_is_used_when_it_begins(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    """It would refuse all before; the one before it stays in use, and no change is needed."""
    later = CA.revoke(BOB.certificate, valid=(soon(), 30))
    begin, _ = begin_and_end(later)
    with constants({"shalekv_wire.tls:SETTLING_S": 0}):
        async with serving(Wire.NATIVE, files.server) as (address, _):
            files.put(CA.certificate, later)
            for _ in range(2):
                assert await ask(open_native(address, files.of(BOB))) == b"question"
            assert "it was revoked" in await refusal(address, files.of(ALICE))
            assert datetime.now(UTC) < begin
            await until(lambda: datetime.now(UTC) > begin, "the begin of the list")
            assert "it was revoked" in await refusal(address, files.of(BOB))
            assert await ask(open_native(address, files.of(ALICE))) == b"question"
    (line,) = [each.getMessage() for each in caplog.records]
    assert "those before stay in use" in line


@pytest.mark.parametrize(
    ("ends_days", "said"),
    [(8, []), (7, ["needs another list"]), (-SECOND_S, ["are refused"])],
)
def test_list_that_ends_is_logged(
    files: Files, caplog: pytest.LogCaptureFixture, ends_days: float, said: list[str]
) -> None:
    """In the last quarter of its time, and after it, once a day."""
    files.put(CA.certificate, CA.revoke(valid=(ends_days - 30, ends_days)))
    contexts = files.listening()
    contexts.current()
    contexts.current()
    found = [each.getMessage() for each in caplog.records]
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


async def test_certificates_of_authorities_below_are_checked_as_well(files: Files) -> None:
    """An authority that was revoked by the one above it, and what it has issued."""
    below = Authority("below", under=CA)
    dave = below.issue(uris=["test:dave"])
    both = CA.certificate + below.certificate
    files.put(both, EMPTY, below.revoke())
    async with serving(Wire.NATIVE, files.server) as (address, _):
        assert await ask(open_native(address, files.of(dave))) == b"question"
        for lists in (
            (EMPTY, below.revoke(dave.certificate)),
            (CA.revoke(below.certificate), below.revoke()),
        ):
            files.put(both, *lists)
            assert "it was revoked" in await refusal(address, files.of(dave))
            assert await ask(open_native(address, files.of(BOB))) == b"question"


UNKNOWN = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.55555.1"), b"\x05\x00")


def part(
    *,
    of_users: bool = False,
    of_authorities: bool = False,
    is_indirect: bool = False,
    place: str = "",
    reasons: frozenset[x509.ReasonFlags] | None = None,
) -> list[x509.ExtensionType]:
    """Extensions of a list that is not for all certificates and reasons."""
    found = x509.IssuingDistributionPoint(
        full_name=[x509.UniformResourceIdentifier(place)] if place else None,
        relative_name=None,
        only_contains_user_certs=of_users,
        only_contains_ca_certs=of_authorities,
        only_some_reasons=reasons,
        indirect_crl=is_indirect,
        only_contains_attribute_certs=False,
    )
    return [found]


PARTS = {
    "of users": part(of_users=True),
    "of authorities": part(of_authorities=True),
    "of others": part(is_indirect=True),
    "of a place": part(place="http://localhost/clients.crl"),
    "of a reason": part(reasons=frozenset([x509.ReasonFlags.key_compromise])),
}
UNUSABLE: dict[str, tuple[Callable[[], list[bytes]], str]] = {
    "cut off": (lambda: [CA.certificate, OF_ALICE[:200]], "cut off"),
    "cut off early": (lambda: [CA.certificate, OF_ALICE[:8]], "cut off"),
    "damaged": (
        lambda: [CA.certificate, OF_ALICE[:100], b"AAAA", OF_ALICE[104:]],
        "revoked certificates",
    ),
    "of another key": (
        lambda: [CA.certificate, Authority("first").revoke()],
        "no list of revoked certificates of 'first'",
    ),
    "of nobody there": (
        lambda: [CA.certificate, EMPTY, OTHER.revoke()],
        "'second' is of no authority of the file",
    ),
    "missing of one": (
        lambda: [CA.certificate, OTHER.certificate, EMPTY],
        "no list of revoked certificates of 'second'",
    ),
    "two of one": (lambda: [CA.certificate, EMPTY, OF_ALICE], "2 lists"),
    "of changes": (
        lambda: [CA.certificate, CA.revoke(critical=[x509.DeltaCRLIndicator(1)])],
        "has changes alone",
    ),
    "that begins later": (lambda: [CA.certificate, CA.revoke(valid=(1, 30))], "begins at 20"),
    "of something unknown": (
        lambda: [CA.certificate, CA.revoke(critical=[UNKNOWN])],
        "has a critical extension 1.3.6.1.4.1.55555.1",
    ),
    "with an unknown entry": (
        lambda: [CA.certificate, CA.revoke(ALICE.certificate, of_entries=[UNKNOWN])],
        "has an entry with a critical extension 1.3.6.1.4.1.55555.1",
    ),
    "by one that may not": (
        lambda: [(mute := Authority("mute", signs_lists=False)).certificate, mute.revoke()],
        "no list of revoked certificates of 'mute'",
    ),
    "another name": (
        lambda: [CA.certificate, EMPTY.replace(b"X509 CRL", b"CRL")],
        "no list of revoked certificates of 'first'",
    ),
    "alone": (lambda: [EMPTY], "clients.pem"),
}
UNUSABLE |= {
    name: (
        partial(list, (CA.certificate, CA.revoke(critical=said))),
        "for a part of its certificates",
    )
    for name, said in PARTS.items()
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_lists_that_would_refuse_good_clients_are_not_used(
    files: Files, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """A start fails with a sentence; a server that runs goes on with the last good lists."""
    make, problem = UNUSABLE[case]
    async with serving(Wire.NATIVE, files.server) as (address, _):
        files.put(*make())
        assert await ask(open_native(address, files.of(BOB))) == b"question"
        assert "it was revoked" in await refusal(address, files.of(ALICE))
    (line,) = [each.getMessage() for each in caplog.records if each.name == "shalekv_wire.tls"]
    assert "those before stay in use" in line
    assert problem in line
    with pytest.raises(InvalidSetting, match=r"clients\.pem"):
        files.listening()


async def test_each_of_several_authorities_has_its_list(files: Files) -> None:
    """The order of certificates and lists does not matter."""
    files.put(OTHER.revoke(CAROL.certificate), CA.certificate, OF_ALICE, OTHER.certificate)
    async with serving(Wire.NATIVE, files.server) as (address, _):
        assert await ask(open_native(address, files.of(BOB))) == b"question"
        for revoked in (ALICE, CAROL):
            assert "it was revoked" in await refusal(address, files.of(revoked))


async def test_authority_that_has_expired_needs_no_list(files: Files) -> None:
    """Files of authorities keep old ones for a while."""
    files.put(CA.certificate, OF_ALICE, Authority("old", valid=(-9, -1)).certificate)
    async with serving(Wire.NATIVE, files.server) as (address, _):
        assert await ask(open_native(address, files.of(BOB))) == b"question"
        assert "it was revoked" in await refusal(address, files.of(ALICE))


async def test_grpcio_takes_no_lists(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot check them: it does not start with some, and does not use a file that gets some."""
    with pytest.raises(InvalidSetting, match="checked by the native transport alone"):
        files.listening(Wire.GRPCIO)
    files.put(CA.certificate, OTHER.certificate)
    async with serving(Wire.GRPCIO, files.server) as (address, _):
        assert await ask(open_native(address, files.of(CAROL))) == b"question"
        files.put(CA.certificate, OF_ALICE)
        assert await ask(open_native(address, files.of(CAROL))) == b"question"
    assert "those before stay in use" in caplog.text


@EITHER_CLIENT
async def test_lists_do_not_concern_servers(files: Files, tmp_path: Path, opened: Open) -> None:
    """A client whose file of authorities has lists goes on, whatever is in them."""
    trusted = tmp_path / "with lists"
    trusted.write_bytes(CA.certificate + CA.revoke(SERVER.certificate, valid=(-3, -1)))
    async with serving(Wire.NATIVE, files.server) as (address, _):
        client = replace(files.of(BOB), authority=str(trusted))
        assert await ask(opened(address, client)) == b"question"


async def test_critical_extensions_that_openssl_knows_are_good(files: Files) -> None:
    """Which key of its authority has signed a list."""
    key = CA.signs_as[1].public_key()
    name = x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    files.put(CA.certificate, CA.revoke(ALICE.certificate, critical=[name]))
    async with serving(Wire.NATIVE, files.server) as (address, _):
        assert await ask(open_native(address, files.of(BOB))) == b"question"
        assert "it was revoked" in await refusal(address, files.of(ALICE))


def test_lists_are_described_for_logs() -> None:
    """By the name of the authority, and the end."""
    (found,) = read_lists(CA.certificate + OF_ALICE)
    assert str(found).startswith("list of revoked certificates of 'first', valid until 20")
