"""The meaning of each answer of a server for a create and for a read; none shows a secret."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from time import time

import pytest

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.store.api import Created, Exists, Unknown
from shalekv.store.s3.store import S3Store
from tests.kit.inline_runtime import gathered
from tests.kit.s3.opening import BUCKET, URL, opened
from tests.kit.s3.scripted_server import Broken, Reply, Request, refused, scripted, stored
from tests.unit.store.s3.conftest import ACCESS_KEY, SECRET_KEY, TOKEN

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
CALLS: dict[str, Callable[[S3Store], Awaitable[object]]] = {
    "create": lambda s3: s3.create(NAME, b"x"),
    "put": lambda s3: s3.put(NAME, b"x"),
    "get": lambda s3: s3.get(NAME),
    "get_range": lambda s3: s3.get_range(NAME, 0, 1),
    "head": lambda s3: s3.head(NAME),
    "list": lambda s3: gathered(s3.list("wal/")),
    "delete": lambda s3: s3.delete([NAME]),
    "copy": lambda s3: s3.copy(NAME, "wal/2"),
    "now": lambda s3: s3.now_ms(),
}


def broken(_: Request) -> Reply:
    raise Broken


async def failure(s3: S3Store, call: str) -> StoreError:
    with pytest.raises(StoreError) as raised:
        await CALLS[call](s3)
    error = raised.value
    assert (error.store, error.operation) == (URL, call)
    return error


def gossip(request: Request) -> str:
    """A message that repeats everything that the request said about its sender."""
    signed = request.headers.get("authorization", "")
    return f"{ACCESS_KEY} {SECRET_KEY} {TOKEN} {signed} ?X-Amz-Signature={signed[-64:]}"


def assert_discreet(text: str) -> None:
    for secret in (ACCESS_KEY, SECRET_KEY, TOKEN, "Signature=", "AWS4-HMAC"):
        assert secret not in text


@pytest.mark.parametrize(("status", "code", "advice"), FOR_GOOD)
async def test_refusals_say_what_to_do(status: int, code: str, advice: str) -> None:
    """A refusal that no retry fixes is raised at once, with store, operation, bucket and remedy."""
    async with scripted(lambda _: refused(status, code)) as server, opened(server.endpoint) as s3:
        for call in ("create", "get"):
            error = await failure(s3, call)
            assert isinstance(error, StoreRefused)
            assert error.name == NAME
            if call == "create":
                assert advice in str(error)
            if code not in {"RequestTimeTooSkewed", "InvalidArgument"}:
                assert server.endpoint in str(error)
                assert BUCKET in error.problem or code in {"NotImplemented", "NoSuchUser"}
        assert len(server.requests) == s3.sent.total == 2


async def test_no_permission() -> None:
    """A refusal for a missing permission names the permission that each operation needs."""
    denied = refused(403, "AccessDenied")
    async with scripted(lambda _: denied) as server, opened(server.endpoint) as s3:
        for call in ("create", "get", "get_range", "head", "list", "delete", "now"):
            doing = "ask for the time" if call == "now" else call
            reported = str(await failure(s3, call))
            assert reported.startswith(f"{URL}: {call} ")
            assert f"may not {doing} in" in reported
            assert "they need s3:" in reported


@pytest.mark.parametrize(("status", "code"), PASSING)
async def test_what_may_pass(status: int, code: str) -> None:
    """After a transient error a create is unknown and a read may be retried; the store itself does
    not retry.
    """
    async with scripted(lambda _: refused(status, code)) as server, opened(server.endpoint) as s3:
        outcome = await s3.create(NAME, b"x")
        assert isinstance(outcome, Unknown)
        assert f"{status} {code}" in outcome.cause
        for call in ("get_range", "put"):
            error = await failure(s3, call)
            assert isinstance(error, StoreUnavailable)
            assert f"{status} {code}" in str(error)
        assert len(server.requests) == s3.sent.total == 3


async def test_preconditions() -> None:
    """412 means that the object exists; even a 404 of S3 is not passed on as the outcome of a
    create.
    """
    exists = refused(412, "PreconditionFailed")
    async with scripted(lambda _: exists) as server, opened(server.endpoint) as s3:
        assert await s3.create(NAME, b"x") == Exists()
        assert server.requests[0].headers["if-none-match"] == "*"
        server.answer = lambda _: refused(404, "NoSuchKey")
        assert isinstance(await s3.create(NAME, b"x"), Unknown)


async def test_missing_objects_and_missing_buckets() -> None:
    """The reply to a HEAD has no body, so another request finds the reason: a missing bucket is not
    reported as a missing object.
    """
    code = "NoSuchKey"
    async with scripted(lambda _: refused(404, code)) as server, opened(server.endpoint) as s3:
        for missing in (s3.head(NAME), s3.get_range(NAME, 0, 0), s3.get(NAME)):
            with pytest.raises(ObjectNotFound):
                await missing
        code = "NoSuchBucket"
        for read in (s3.head(NAME), s3.get_range(NAME, 0, 0), s3.get(NAME), s3.now_ms()):
            with pytest.raises(StoreRefused, match=f"there is no bucket {BUCKET}"):
                await read
        assert [request.method for request in server.requests][:2] == ["HEAD", "GET"]
        assert len(server.requests) == s3.sent.total


CUT = Reply(200, b"half", {"Last-Modified": formatdate(usegmt=True)}, said_bytes=8)


@pytest.mark.parametrize(
    ("reply", "reported", "calls"),
    [
        # Proxies whose servers restart: an existing object must not appear to be gone.
        *((Reply(404, body), "404", [*CALLS][1:]) for body in (b"", b"backend", b"<a>404</a>")),
        # A success without the fields of S3 is that of a proxy, and acknowledges nothing.
        *(
            (reply, "another server", ["put", "copy", "get", "head", "list"])
            for reply in (Reply(), Reply(204), Reply(200, b"<html><body>Log in</body></html>"))
        ),
        (Reply(502, b"<html>Bad gateway"), "502", ["get"]),
        # A copy that fails after the status 200 was sent has failed.
        (Reply(200, refused(500, "InternalError").body), "", ["copy"]),
        (CUT, "", ["get"]),
    ],
)
async def test_answers_of_somebody_else(reply: Reply, reported: str, calls: list[str]) -> None:
    """An answer that is not from S3, or is cut, says nothing about an object."""
    async with scripted(lambda _: reply) as server, opened(server.endpoint) as s3:
        if reply is not CUT:
            assert isinstance(await s3.create(NAME, b"x"), Unknown)
        for call in calls:
            error = await failure(s3, call)
            assert isinstance(error, StoreUnavailable)
            assert reported in str(error)


@pytest.mark.parametrize(("shift_s", "side"), [(3_600, "behind"), (-3_600, "ahead of")])
async def test_the_skew_is_reported(shift_s: int, side: str) -> None:
    """A refusal because of the clock says in which direction it is wrong, and by how much."""

    def answer(_: Request) -> Reply:
        reply = refused(403, "RequestTimeTooSkewed")
        return Reply(403, reply.body, {"Date": formatdate(time() + shift_s, usegmt=True)})

    async with scripted(answer) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreRefused, match=r"clock of this machine is 3[56]\d\d s") as raised:
            await s3.create(NAME, b"x")
        assert side in raised.value.problem


async def test_redirections_are_not_followed() -> None:
    """A PUT that is redirected is not sent again, which would not be counted. The error names the
    region of the bucket.
    """
    async with scripted(lambda _: stored()) as other, opened(other.endpoint) as s3:
        assert await s3.create(NAME, b"x") == Created()
    moved = Reply(307, b"", {"Location": f"{other.endpoint}/bucket/folder/wal/1.sst"})
    async with scripted(lambda _: moved) as server, opened(server.endpoint) as s3:
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        assert (len(server.requests), len(other.requests)) == (1, 1)
        elsewhere = refused(400, "AuthorizationHeaderMalformed", Region="eu-north-1")
        server.answer = lambda _: elsewhere
        assert "set --region eu-north-1" in str(await failure(s3, "get"))
        assert len(server.requests) == 2


async def test_a_connection_that_breaks() -> None:
    """A create whose reply never comes is unknown, and is not sent a second time."""
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        assert await s3.create(NAME, b"x") == Created()  # leaves a connection that is kept
        server.answer = broken
        assert isinstance(await s3.create(NAME, b"x"), Unknown)
        assert len(server.requests) == s3.sent.total == 2
        assert server.connections == 1
        assert isinstance(await failure(s3, "get"), StoreUnavailable)
        assert len(server.requests) == s3.sent.total == 3


async def test_secrets_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """No error of any call, and no log at the level DEBUG, shows the request's own headers that a
    server repeats, also for one object of a batch.
    """
    caplog.set_level(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.NOTSET)
    logging.getLogger("aiobotocore").setLevel(logging.NOTSET)

    async def error_text(call: str) -> str:
        try:
            outcome = await CALLS[call](s3)
        except StoreError as error:
            return "".join(traceback.format_exception(error))
        assert isinstance(outcome, Unknown), outcome
        return outcome.cause

    async with scripted(broken) as server, opened(server.endpoint) as s3:
        codes = [(status, code) for status, code, _ in FOR_GOOD] + PASSING
        for number, (status, code) in enumerate(codes):
            server.answer = lambda request, s=status, c=code: refused(s, c, gossip(request))  # type: ignore[misc]
            # Each code from some calls, and each call with some codes.
            for call in [*CALLS][number % 3 :: 3]:
                assert_discreet(await error_text(call))
        server.answer = lambda request: Reply(500, gossip(request).encode())
        for call in CALLS:
            assert_discreet(await error_text(call))
        entry = "<Key>folder/wal/1</Key><Code>Odd</Code><Message>{}</Message>"
        server.answer = lambda request: Reply(
            200, f"<R><Error>{entry.format(gossip(request))}</Error></R>".encode()
        )
        assert_discreet(await error_text("delete"))
        signed = [request.headers for request in server.requests]
    assert all(ACCESS_KEY in headers["authorization"] for headers in signed)
    assert all(headers["x-amz-security-token"] == TOKEN for headers in signed)
    assert_discreet(caplog.text)
