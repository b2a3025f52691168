"""Revoked certificates over real sockets: who is refused, from when on, and what is logged."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shalekv.errors import InvalidSetting
from shalekv.rpc.native_server import listening
from shalekv.rpc.revocation import read_lists
from shalekv.settings import Wire
from shalekv.settings.security import TlsSettings
from shalekv_wire.status import CallFailed
from shalekv_wire.tls import TlsContexts, TlsFiles
from tests.kit.certificates import LOCAL, Authority, Pair
from tests.kit.constants import constants
from tests.kit.timeouts import until
from tests.unit.rpc.test_tls import ASK, EITHER_CLIENT, Open, ask, open_native, serving

CA, OTHER = Authority("first"), Authority("second")
SERVER = CA.issue(*LOCAL)
ALICE, BOB = CA.issue(uris=["test:alice"]), CA.issue(uris=["test:bob"])
CAROL = OTHER.issue(uris=["test:carol"])
EMPTY, OF_ALICE = CA.revoke(), CA.revoke(ALICE.certificate)
SECOND_S = 1 / 86_400  # in days


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
        assert await ask(open_native(address, files.of(BOB))) == b"question"
        assert await ask(old) == b"question"
    warning, *others = [each for each in caplog.records if each.levelname != "INFO"]
    assert "has no lists of revoked certificates any more" in warning.getMessage()
    assert not others


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


def greet(
    address: str, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[ssl.SSLSession | None, bool]:
    """Connect, with a session from before; returns the new one, and whether it was resumed."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        context.wrap_socket(plain, server_hostname=host, session=session) as secured,
    ):
        assert secured.recv(9)
        return secured.session, bool(secured.session_reused)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_list_that_has_ended_refuses_all(
    files: Files, caplog: pytest.LogCaptureFixture, version: ssl.TLSVersion
) -> None:
    """From its end on, also for sessions from before, with a line; a new one serves again."""
    end = datetime.now(UTC) + timedelta(seconds=3)
    left_days = (end - datetime.now(UTC)) / timedelta(days=1)
    files.put(CA.certificate, CA.revoke(valid=(-1, left_days)))
    context = TlsContexts(files.of(BOB), is_server=False).current()
    context.maximum_version = context.minimum_version = version
    async with serving(Wire.NATIVE, files.server) as (address, _):
        session, _ = await asyncio.to_thread(greet, address, context, None)
        await until(lambda: datetime.now(UTC) > end, "the end of the list")
        with pytest.raises(ssl.SSLError, match="ALERT"):
            await asyncio.to_thread(greet, address, context, session)
        before, after = [each for each in caplog.records if each.name == "shalekv_wire.tls"]
        assert "needs another list" in before.getMessage()
        assert after.levelname == "ERROR"
        assert "clients of an authority are refused" in after.getMessage()
        assert "'first'" in after.getMessage()
        files.put(CA.certificate, EMPTY)
        await asyncio.to_thread(greet, address, context, session)


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
    "of changes": (lambda: [CA.certificate, CA.revoke(is_delta=True)], "has changes alone"),
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


def test_lists_are_described_for_logs() -> None:
    """By the name of the authority, and the end."""
    (found,) = read_lists(CA.certificate + OF_ALICE)
    assert str(found).startswith("list of revoked certificates of 'first', valid until 20")
