"""What each answer of a server means for a create and for a read."""

from __future__ import annotations

from email.utils import formatdate
from time import time

import pytest

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.store.api import Created, Exists, Unknown
from tests.kit.s3.opening import BUCKET, URL, opened
from tests.kit.s3.scripted_server import Broken, Reply, Request, refused, scripted, stored

NAME = "wal/1.sst"
FOR_GOOD = [
    (403, "AccessDenied", "s3:PutObject"),
    (403, "InvalidAccessKeyId", "does not know the access key"),
    (403, "SignatureDoesNotMatch", "secret key"),
    (400, "ExpiredToken", "renew"),
    (400, "InvalidToken", "renew"),
    (403, "RequestTimeTooSkewed", "clock of this machine"),
    (404, "NoSuchBucket", "there is no bucket"),
    (301, "PermanentRedirect", "another region"),
    (400, "AuthorizationHeaderMalformed", "another region"),
    (400, "IllegalLocationConstraintException", "another region"),
    (404, "NoSuchUser", "404 NoSuchUser"),
    (405, "MethodNotAllowed", "does not allow"),
    (501, "NotImplemented", "--cas two_phase"),
    (403, "SomethingOfTheirOwn", "403 SomethingOfTheirOwn"),
    (400, "InvalidArgument", "no"),
]
PASSING = [
    (500, "InternalError"),
    (502, "BadGateway"),
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (504, "GatewayTimeout"),
    (429, "TooManyRequests"),
    (400, "RequestTimeout"),
    (400, "BadDigest"),
    (400, "IncompleteBody"),
    (408, "RequestTimeout"),
    (409, "ConditionalRequestConflict"),
    (409, "OperationAborted"),
    (307, "TemporaryRedirect"),
]


@pytest.mark.parametrize(("status", "code", "advice"), FOR_GOOD)
async def test_refusals_say_what_to_do(status: int, code: str, advice: str) -> None:
    """What does not pass by itself is refused at once, with store, operation, bucket, remedy."""
    async with scripted(lambda _: refused(status, code)) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreRefused, match=advice) as raised:
            await s3.create(NAME, b"x")
        assert _told(raised.value, "create")
        if code not in {"RequestTimeTooSkewed", "InvalidArgument"}:
            assert server.endpoint in str(raised.value)
        if code not in {"RequestTimeTooSkewed", "InvalidArgument", "NotImplemented", "NoSuchUser"}:
            assert BUCKET in raised.value.problem
        with pytest.raises(StoreRefused) as raised:
            await s3.get(NAME)
        assert _told(raised.value, "get")
        assert len(server.requests) == s3.sent.total == 2


@pytest.mark.parametrize(("status", "code"), PASSING)
async def test_what_may_pass(status: int, code: str) -> None:
    """What may pass leaves a create unknown, and a read to be repeated; nothing repeats it here."""
    async with scripted(lambda _: refused(status, code)) as server, opened(server.endpoint) as s3:
        outcome = await s3.create(NAME, b"x")
        assert isinstance(outcome, Unknown)
        assert f"{status} {code}" in outcome.cause
        with pytest.raises(StoreUnavailable, match=f"{status} {code}") as raised:
            await s3.get_range(NAME, 0, 1)
        assert _told(raised.value, "get_range")
        with pytest.raises(StoreUnavailable, match=f"{status} {code}") as raised:
            await s3.put(NAME, b"x")
        assert _told(raised.value, "put")
        assert len(server.requests) == s3.sent.total == 3


async def test_a_precondition_that_failed() -> None:
    """412 means that the object exists."""
    answer = refused(412, "PreconditionFailed")
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        assert await s3.create(NAME, b"x") == Exists()
        (request,) = server.requests
        assert request.headers["if-none-match"] == "*"


async def test_missing_objects_and_missing_buckets() -> None:
    """A reply to HEAD has no body: why it failed is found out, so that a missing bucket is none
    of a missing object.
    """
    code = "NoSuchKey"
    async with scripted(lambda _: refused(404, code)) as server, opened(server.endpoint) as s3:
        with pytest.raises(ObjectNotFound):
            await s3.head(NAME)
        with pytest.raises(ObjectNotFound):
            await s3.get_range(NAME, 0, 0)
        with pytest.raises(ObjectNotFound):
            await s3.get(NAME)
        code = "NoSuchBucket"
        for read in (s3.head(NAME), s3.get_range(NAME, 0, 0), s3.get(NAME), s3.now_ms()):
            with pytest.raises(StoreRefused, match=f"there is no bucket {BUCKET}"):
                await read
        assert [request.method for request in server.requests][:2] == ["HEAD", "GET"]
        assert len(server.requests) == s3.sent.total


@pytest.mark.parametrize("body", [b"", b"default backend", b"<html>Not found", b"<a>404</a>"])
async def test_a_404_of_somebody_else(body: bytes) -> None:
    """A 404 without a code of S3, as proxies answer whose servers restart, is no news of an object:
    one that is there must not look as if it were gone.
    """
    async with scripted(lambda _: Reply(404, body)) as server, opened(server.endpoint) as s3:
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        reads = (s3.get(NAME), s3.get_range(NAME, 0, 1), s3.head(NAME), s3.now_ms())
        for call in (*reads, s3.copy(NAME, "wal/2"), s3.delete([NAME]), anext(s3.list("wal/"))):
            with pytest.raises(StoreUnavailable, match="404"):
                await call


async def test_a_create_never_misses_an_object() -> None:
    """Even a 404 of S3's own is none that a create passes on: no object is asked for."""
    answer = refused(404, "NoSuchKey")
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        assert isinstance(await s3.create(NAME, b"x"), Unknown)


@pytest.mark.parametrize(
    "reply", [Reply(), Reply(204), Reply(200, b"<html><body>Log in</body></html>")]
)
async def test_a_success_of_somebody_else(reply: Reply) -> None:
    """A success that does not say of which object is that of a proxy, and acknowledges nothing."""
    async with scripted(lambda _: reply) as server, opened(server.endpoint) as s3:
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        writes, reads = (s3.put(NAME, b"x"), s3.copy(NAME, "wal/2")), (s3.get(NAME), s3.head(NAME))
        for call in (*writes, *reads, anext(s3.list("wal/"))):
            with pytest.raises(StoreUnavailable, match="another server"):
                await call


@pytest.mark.parametrize(("shift_s", "side"), [(3_600, "behind"), (-3_600, "ahead of")])
async def test_the_skew_is_told(shift_s: int, side: str) -> None:
    """A refusal for the clock says which way it is wrong, and by how much."""

    def answer(_: Request) -> Reply:
        reply = refused(403, "RequestTimeTooSkewed")
        return Reply(403, reply.body, {"Date": formatdate(time() + shift_s, usegmt=True)})

    async with scripted(answer) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreRefused, match=r"clock of this machine is 3[56]\d\d s") as raised:
            await s3.create(NAME, b"x")
        assert side in raised.value.problem


async def test_the_region_of_the_bucket_is_told() -> None:
    """Where the store says in which region the bucket is, the error passes it on, and nobody
    goes there by himself.
    """
    answer = refused(400, "AuthorizationHeaderMalformed", Region="eu-north-1")
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreRefused, match="set --region eu-north-1"):
            await s3.get(NAME)
        assert len(server.requests) == 1


async def test_redirections_are_not_followed() -> None:
    """A PUT that is redirected is not sent to a second place: it would not be counted."""
    async with scripted(lambda _: stored()) as other, opened(other.endpoint) as s3:
        assert await s3.create(NAME, b"x") == Created()
    moved = Reply(307, b"", {"Location": f"{other.endpoint}/bucket/folder/wal/1.sst"})
    async with scripted(lambda _: moved) as server, opened(server.endpoint) as s3:
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        assert (len(server.requests), len(other.requests)) == (1, 1)


async def test_an_error_behind_status_200() -> None:
    """A copy whose status was sent before it failed has failed."""
    answer = Reply(200, refused(500, "InternalError").body)
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreUnavailable, match="copy"):
            await s3.copy("levels/1", "levels/2")
        assert len(server.requests) == 1


async def test_a_reply_that_is_no_xml() -> None:
    """A page of a gateway in the place of an answer is no answer."""
    answer = Reply(502, b"<html>Bad gateway")
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        with pytest.raises(StoreUnavailable):
            await s3.get(NAME)


async def test_a_body_that_is_cut_off() -> None:
    """An object of which a part arrived was not read."""
    headers = {"Last-Modified": "Sat, 01 Jan 2028 00:00:00 GMT"}
    cut = Reply(200, b"half", headers, said_bytes=8)
    async with scripted(lambda _: cut) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreUnavailable):
            await s3.get(NAME)


async def test_a_connection_that_breaks() -> None:
    """A create whose reply never comes is unknown, and is not sent a second time."""

    def broken(_: Request) -> Reply:
        raise Broken

    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        assert await s3.create(NAME, b"x") == Created()  # leaves a connection that is kept
        server.answer = broken
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        assert len(server.requests) == s3.sent.total == 2
        assert server.connections == 1
        with pytest.raises(StoreUnavailable):
            await s3.get(NAME)
        assert len(server.requests) == s3.sent.total == 3


def _told(error: StoreError, operation: str) -> bool:
    return (error.store, error.operation, error.name) == (URL, operation, NAME)
