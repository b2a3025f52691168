"""Real calls with web tokens of a real issuer, and what peers see that send wrong tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from shalekv.protocol.access import Grant, Policy, Role, Verb
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import (
    AccessUnknown,
    Client,
    PermissionDenied,
    RetryPolicy,
    Unauthenticated,
)
from tests.kit.constants import constants
from tests.kit.processes.guarded import GuardedServer, TokenBook, guarded_writer
from tests.kit.processes.in_process import memory_store
from tests.kit.serving.guarded import prefix
from tests.kit.serving.token_issuer import AUDIENCE, TokenIssuer, silence, token_issuer

ACCESS = "shalekv.server.access."
DETAILS = "grpc-status-details-bin"
ONCE = RetryPolicy(attempts_max=1)
POLICY = Policy(
    is_enforced=True,
    roles=(Role("orders", (prefix(b"o/", Verb.READ, Verb.WRITE, Verb.WATCH),)),),
    grants=(Grant("claim:groups=ops", ("orders",)), Grant("token:ann", ("orders",))),
)


@asynccontextmanager
async def served(issuer: TokenIssuer, tokens: TokenBook) -> AsyncIterator[GuardedServer]:
    """A server that accepts the tokens of the issuer and those of the file."""
    access = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "oidc_ca": issuer.ca}
    async with guarded_writer(memory_store(), tokens, access=access) as server:
        await server.set_policy(POLICY)
        yield server


def client_of(
    server: GuardedServer, token: str, retry: RetryPolicy = ONCE, *, coalesce: bool = True
) -> Client:
    return Client(server.listen, access_token=token, retry=retry, coalesce=coalesce)


async def test_claims_of_a_web_token_decide(tmp_path: Path) -> None:
    """A call has the roles of the claims; a stream ends when the issuer withdraws the key."""
    often = {ACCESS + "issuer:ASKED_INTERVAL_MS": 0.0, ACCESS + "guard:SWEEP_S": 0.02}
    with constants(often):
        async with (
            asyncio.timeout(30),
            token_issuer(tmp_path) as issuer,
            served(issuer, TokenBook(tmp_path)) as server,
            client_of(server, issuer.token("k1", groups=["ops", "dev"])) as client,
            client_of(server, issuer.token("k1", groups=["dev"])) as other,
        ):
            await client.put(b"o/1", b"v")
            with pytest.raises(PermissionDenied):
                await client.put(b"p/1", b"v")
            with pytest.raises(PermissionDenied):
                await other.get(b"o/1")
            async with client.watch(prefix=b"o/") as watch:
                issuer.rotate("k2")
                async with client_of(server, issuer.token("k2", groups=["ops"])) as newer:
                    assert await newer.get(b"o/1") is not None
                with pytest.raises(Unauthenticated):
                    await anext(aiter(watch))
            with pytest.raises(Unauthenticated):
                await client.get(b"o/1")


async def test_an_issuer_that_is_away_makes_no_token_invalid(tmp_path: Path) -> None:
    """Calls wait for it, by their retries; calls with other credentials do not."""
    often = {ACCESS + "issuer:REQUEST_S": 0.1, ACCESS + "issuer:RETRY_MS_MAX": 100.0}
    with constants(often):
        async with asyncio.timeout(30), token_issuer(tmp_path) as issuer:
            issuer.answer = silence
            tokens = TokenBook(tmp_path, "ann")
            async with (
                served(issuer, tokens) as server,
                grpc.aio.insecure_channel(server.listen) as channel,
                client_of(server, tokens.text("ann")) as ann,
                client_of(server, issuer.token(groups="ops"), RetryPolicy()) as patient,
            ):
                put = kv_pb2.PutRequest(key=b"o/1", value=b"v")
                shown = (("authorization", f"Bearer {issuer.token(groups='ops')}"),)
                with pytest.raises(grpc.aio.AioRpcError) as away:
                    await kv_pb2_grpc.KVStub(channel).Put(put, metadata=shown)
                assert away.value.code() is grpc.StatusCode.UNAVAILABLE
                assert b"ISSUER_UNAVAILABLE" in dict(away.value.trailing_metadata() or ())[DETAILS]
                await ann.put(b"o/2", b"v")
                issuer.answer = None
                await patient.put(b"o/1", b"v")


async def test_sessions_tell_that_the_issuer_is_away(tmp_path: Path) -> None:
    """Sessions report the reason and that nothing was applied, and come back by themselves."""
    often = {ACCESS + "issuer:REQUEST_S": 0.1, ACCESS + "issuer:RETRY_MS_MAX": 100.0}
    with constants(often):
        async with asyncio.timeout(30), token_issuer(tmp_path) as issuer:
            issuer.answer = silence
            async with served(issuer, TokenBook(tmp_path)) as server:
                token = issuer.token(groups="ops")
                other = server.listen.replace("127.0.0.1", "localhost")
                async with (
                    client_of(server, token) as once,
                    client_of(server, token, RetryPolicy()) as patient,
                    Client([server.listen, other], access_token=token) as several,
                ):
                    for client in (once, once, patient, several):
                        with pytest.raises(AccessUnknown, match="issuer does not answer") as away:
                            await client.put(b"o/1", b"v", timeout_ms=300)
                        assert away.value.reason == "ISSUER_UNAVAILABLE"
                    async with patient.session() as session:
                        refused = session.put(b"o/1", b"v")
                    with pytest.raises(AccessUnknown):
                        refused.result()
                    waiting = [asyncio.ensure_future(c.add(b"o/n")) for c in (patient, several)]
                    issuer.answer = None
                    assert {await each for each in waiting} == {1, 2}
                    assert await patient.get(b"o/1") is None


async def test_guessing_makes_a_peer_wait_and_those_who_are_known_go_on(tmp_path: Path) -> None:
    """A client that guesses is told how long to wait. From the same address, one whose token was
    valid before goes on, and one with a new token waits. No log has a part of a token.
    """
    tokens = TokenBook(tmp_path, "ann", "bob")
    guesses = {ACCESS + "authenticator:LUCKY": 10**9, ACCESS + "authenticator:FIRST_MS": 10_000.0}
    with constants(guesses), capture_logs() as logs:
        async with (
            asyncio.timeout(30),
            token_issuer(tmp_path) as issuer,
            served(issuer, tokens) as server,
            client_of(server, tokens.text("ann")) as ann,
            client_of(server, tokens.text("bob")) as bob,
            client_of(server, tokens.text("ann")[:-1], coalesce=False) as guessing,
        ):
            await ann.put(b"o/1", b"v")
            advice = None
            while not advice:
                with pytest.raises(Unauthenticated) as refused:
                    await guessing.get(b"o/1")
                advice = refused.value.details.retry_after_ms
            for _ in range(20):
                await ann.get(b"o/1")
            with pytest.raises(Unauthenticated) as refused:
                await bob.get(b"o/1")
            assert refused.value.details.retry_after_ms
            shown = f"{logs} {refused.value!r} {refused.value}"
    assert "again and again" in shown
    for name in ("ann", "bob"):
        secret = tokens.text(name).rpartition("_")[2]
        assert not any(secret[at : at + 8] in shown for at in range(0, 48, 8))


async def test_logs_have_no_part_of_a_web_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither those of the server nor those of libraries, at any level, nor errors of a client."""
    caplog.set_level(logging.DEBUG)
    async with (
        asyncio.timeout(30),
        token_issuer(tmp_path) as issuer,
        served(issuer, TokenBook(tmp_path)) as server,
    ):
        good = issuer.token(groups="ops")
        wrong = [good[:-8] + "AAAAAAAA", issuer.token("k7"), issuer.token(aud="x"), "e30.e30.e30"]
        with capture_logs() as logs:
            async with client_of(server, good) as client:
                await client.put(b"o/1", b"v")
            texts = []
            for token in wrong:
                async with client_of(server, token) as client:
                    with pytest.raises(Unauthenticated) as refused:
                        await client.put(b"o/1", b"v")
                    texts.append(f"{refused.value!r} {refused.value}")
    shown = f"{logs} {texts} {caplog.text}"
    for token in (good, *wrong):
        for part in token.split("."):
            assert len(part) < 8 or part[:20] not in shown
