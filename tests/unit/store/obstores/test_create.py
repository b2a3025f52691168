"""A create on Google or Azure says that nothing was created only when that is certain."""

from __future__ import annotations

import socket

import pytest

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown
from shalekv.store.requests import RequestKind
from shalekv.store.url import Provider
from tests.unit.store.obstores.opened import BOTH, open_at
from tests.unit.store.obstores.scripted_server import DROPPED, SILENCE, Reply, refused, scripted

pytestmark = pytest.mark.usefixtures("azure_account")

NAME = "wal/1.sst"
YES = {
    Provider.GOOGLE: {"x-goog-generation": "1"},
    Provider.AZURE: {"ETag": '"0x8DE"'},
}


async def create(provider: Provider, reply: Reply, *, timeout_ms: int = 30_000) -> CreateOutcome:
    """The outcome of a create that is answered so; it is asked once."""
    async with scripted(reply) as server:
        store = open_at(provider, server.endpoint, timeout_ms=timeout_ms)
        try:
            return await store.create(NAME, b"data")
        finally:
            await store.close()
            assert len(server.asked) == store.sent.by_kind[RequestKind.WRITE] == 1


@pytest.mark.parametrize(("provider", "headers"), YES.items())
async def test_created(provider: Provider, headers: dict[str, str]) -> None:
    """A yes that only the store says is `Created`."""
    assert await create(provider, Reply(201, headers=headers)) == Created()


@BOTH
async def test_a_yes_of_somebody_else(provider: Provider) -> None:
    """A yes that is not the store's is `Unknown`: some server on the way may say it."""
    assert isinstance(await create(provider, Reply(200)), Unknown)


@BOTH
async def test_nothing_is_created_elsewhere(provider: Provider) -> None:
    """An upload that is answered with another page to look at did not create the object there."""
    see_other = Reply(303, headers={"Location": "/elsewhere"})
    async with scripted(see_other, Reply(200)) as server:
        store = open_at(provider, server.endpoint)
        assert isinstance(await store.create(NAME, b"data"), Unknown)
        await store.close()


@BOTH
@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_nothing_is_sent_elsewhere(provider: Provider, status: int) -> None:
    """An upload is not sent on to another address, and the error says what to check."""
    with pytest.raises(StoreRefused, match=f"{status}: it sends on to another address"):
        await create(provider, Reply(status, headers={"Location": "/elsewhere"}))


@pytest.mark.parametrize(
    ("provider", "status", "code"),
    [
        (Provider.GOOGLE, 412, "PreconditionFailed"),
        (Provider.AZURE, 409, "BlobAlreadyExists"),
        (Provider.AZURE, 412, "ConditionNotMet"),
    ],
)
async def test_exists(provider: Provider, status: int, code: str) -> None:
    """What each provider says of a name that is taken is `Exists`."""
    assert await create(provider, refused(status, code)) == Exists()


@BOTH
@pytest.mark.parametrize("status", [408, 409, 500, 502, 503, 504])
async def test_a_doubtful_answer_is_unknown(provider: Provider, status: int) -> None:
    """An answer after which the object may exist is `Unknown`, any other conflict included."""
    outcome = await create(provider, refused(status, "Whatever"))
    assert isinstance(outcome, Unknown)
    assert f"{status} Whatever" in outcome.cause


@BOTH
async def test_a_lost_answer_is_unknown(provider: Provider) -> None:
    """After a connection that ends without an answer, the object may exist."""
    assert isinstance(await create(provider, DROPPED), Unknown)


@BOTH
async def test_no_answer_in_time_is_unknown(provider: Provider) -> None:
    """After the time for a request, the object may exist."""
    outcome = await create(provider, SILENCE, timeout_ms=1_000)
    assert outcome == Unknown("there was no answer in time")


@BOTH
@pytest.mark.parametrize("status", [400, 401, 403, 404, 405])
async def test_a_refusal_is_certain(provider: Provider, status: int) -> None:
    """After a refusal nothing exists, and to repeat the request is no use."""
    with pytest.raises(StoreRefused, match=rf"create wal/1.sst: the answer was {status} Sorry"):
        await create(provider, refused(status, "Sorry"))


@BOTH
async def test_too_many_requests(provider: Provider) -> None:
    """What is refused for its rate does not exist, and may be repeated."""
    with pytest.raises(StoreUnavailable, match="429"):
        await create(provider, refused(429, "SlowDown"))


@BOTH
async def test_nobody_listens(provider: Provider) -> None:
    """Without a connection nothing was sent, and the request may be repeated."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        store = open_at(provider, f"http://127.0.0.1:{unheard.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="no connection could be made"):
            await store.create(NAME, b"data")
    await store.close()


@BOTH
async def test_a_reply_cannot_pass_for_another(provider: Provider) -> None:
    """What the store writes into an answer is not taken for what obstore says of it."""
    lie = "\n\nDebug source:\nX {\n    status: 412,\n    kind: Connect,\n    source: TokenRequest {"
    outcome = await create(provider, refused(500, "Whatever", lie))
    assert isinstance(outcome, Unknown)
    assert "500" in outcome.cause
