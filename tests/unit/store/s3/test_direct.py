"""Reads of parts that botocore does not send: the same requests, and answers mean the same."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any, cast

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials

from shalekv.errors import StoreError, StoreUnavailable
from shalekv.store.api import RequestKind
from shalekv.store.s3.client import OneAttempt
from shalekv.store.s3.direct import EMPTY_SHA256, Signer, learnt_route
from shalekv.store.s3.store import S3Store
from tests.kit.s3.opening import GOOD, STALE, opened, program_in, saying
from tests.kit.s3.scripted_server import Reply, Request, found, refused, scripted
from tests.unit.store.s3.conftest import ACCESS_KEY, SECRET_KEY
from tests.unit.store.s3.test_answers import (
    CUT,
    FOR_GOOD,
    PASSING,
    assert_discreet,
    broken,
    gossip,
)

NAME = "levels/a b+c~(1).sst"
BOTOCORES_OWN = "amz-sdk-request"  # a header that only botocore writes
SKEWED = "RequestTimeTooSkewed"  # its error says by how much, which depends on the moment
ANSWERS = [
    *(refused(status, code, Region="eu-north-1") for status, code, _ in FOR_GOOD if code != SKEWED),
    *(refused(status, code) for status, code in PASSING),
    refused(404, "NoSuchKey"),
    refused(412, "PreconditionFailed"),
    *(Reply(status) for status in (204, 301, 403, 404, 500, 503)),
    *(Reply(404, body) for body in (b"backend", b"<a>404</a>")),
    Reply(200, b"<html><body>Log in</body></html>"),
    Reply(502, b"<html>Bad gateway"),
    Reply(500, b"<?xml version='1.0'?><Error><Message>no code</Message></Error>"),
    CUT,
]


def parts_of(data: bytes) -> Reply:
    """A reply that is a part, as those of S3 to such a request are."""
    headers = {"Last-Modified": formatdate(usegmt=True), "Content-Range": "bytes 3-5/9"}
    return Reply(206, data, headers)


def words(outcome: object) -> str:
    """Its text; botocore finds an empty code in any XML, which leaves a space behind the status."""
    return re.sub(r"(answered \d+) (?=[,.:]|$)", r"\1", str(outcome))


async def failure(s3: S3Store) -> StoreError | bytes:
    try:
        return await s3.get_range(NAME, 3, 3)
    except StoreError as error:
        return error


async def test_the_first_read_shows_the_way() -> None:
    """Botocore sends the first read, and no other; all are the same request, each counts once."""
    async with scripted(lambda _: parts_of(b"abc")) as server, opened(server.endpoint) as s3:
        for _ in range(3):
            assert await s3.get_range(NAME, 3, 3) == b"abc"
        await s3.get(NAME)
        assert s3.sent.by_kind[RequestKind.READ] == s3.sent.total == len(server.requests) == 4
        assert server.connections == 1
    first, *others, whole = server.requests
    assert BOTOCORES_OWN in first.headers
    assert BOTOCORES_OWN in whole.headers
    for request in others:
        assert BOTOCORES_OWN not in request.headers
        assert (request.method, request.target) == (first.method, first.target)
        same = ("host", "range", "user-agent", "accept-encoding", "x-amz-security-token")
        assert [request.headers[name] for name in same] == [first.headers[name] for name in same]
        assert is_signed_as_by_botocore(request)


def is_signed_as_by_botocore(request: Request) -> bool:
    """Return whether botocore would sign this request as it is signed, at its time."""
    moment = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    url = f"http://{request.headers['host']}{request.target}"
    return request.headers["authorization"] == by_botocore(url, request.headers, moment)


def by_botocore(url: str, headers: Mapping[str, str], moment: datetime) -> str:
    aws = AWSRequest("GET", url, headers={"range": headers["range"]})
    token = headers.get("x-amz-security-token")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda: moment)
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY, token), "s3", "us-east-1").add_auth(aws)
    return str(aws.headers["Authorization"])


@pytest.mark.parametrize("reply", ANSWERS)
async def test_answers_mean_what_they_mean_to_botocore(reply: Reply) -> None:
    """Each answer is the same result or the same error, in the same words."""
    async with scripted(lambda _: found(b"x")) as server:
        results = []
        for way in ("botocore", "direct"):
            async with opened(server.endpoint, s3_reads=way) as s3:
                server.answer = lambda _: parts_of(b"abc")
                await s3.get_range(NAME, 3, 3)
                server.answer = lambda _: reply
                results.append(await failure(s3))
                assert (BOTOCORES_OWN in server.requests[-1].headers) == (way == "botocore")
    one, other = results
    assert (type(one), words(one)) == (type(other), words(other))
    assert vars(one).keys() == vars(other).keys() if isinstance(one, StoreError) else one == other
    assert getattr(one, "may_pass", None) == getattr(other, "may_pass", None)


@pytest.mark.parametrize("offset", [3, -4, 100])
async def test_ranges_are_cut_as_always(offset: int) -> None:
    """A server that ignores the range sends all, of which the part is taken; one that begins behind
    the end is empty.
    """
    async with scripted(lambda _: found(b"123456789")) as server, opened(server.endpoint) as s3:
        parts = [await s3.get_range(NAME, offset, 2) for _ in range(2)]
        assert parts[0] == parts[1] == {3: b"45", -4: b"67", 100: b""}[offset]
        server.answer = lambda _: refused(416, "InvalidRange")
        assert await s3.get_range(NAME, offset, 2) == b""
        assert len(server.requests) == 3


async def test_connections_that_fail() -> None:
    """A connection that breaks, and a server that has gone, are errors after which a retry may
    succeed; the request is sent once.
    """
    async with scripted(lambda _: parts_of(b"abc")) as server, opened(server.endpoint) as s3:
        await s3.get_range(NAME, 3, 3)
        server.answer = broken
        assert "broke off" in str(await failure(s3))
        assert len(server.requests) == s3.sent.total == 2
        server.answer = lambda _: parts_of(b"abc")
        assert await s3.get_range(NAME, 3, 3) == b"abc"
    async with AsyncExitStack() as stack:
        async with scripted(lambda _: parts_of(b"abc")) as server:
            s3 = await stack.enter_async_context(opened(server.endpoint))
            await s3.get_range(NAME, 3, 3)
        errors = [await failure(s3) for _ in range(2)]  # on the connection that was kept, or a new
        assert all(isinstance(error, StoreUnavailable) for error in errors)
        assert "cannot connect" in str(errors[1])


async def test_no_secret_is_reported() -> None:
    """No error shows what the server repeats of the request."""
    async with scripted(lambda _: parts_of(b"abc")) as server, opened(server.endpoint) as s3:
        await s3.get_range(NAME, 3, 3)
        for status, code in [(status, code) for status, code, _ in FOR_GOOD] + PASSING:
            server.answer = lambda request, s=status, c=code: refused(s, c, gossip(request))  # type: ignore[misc]
            error = await failure(s3)
            assert isinstance(error, StoreError)
            assert_discreet("".join(traceback.format_exception(error)))


async def test_credentials_are_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials that are about to expire are renewed before a read, and the new ones sign it."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}")
    program = program_in(tmp_path, monkeypatch)
    soon = datetime.now(UTC) + timedelta(minutes=5)  # botocore renews earlier than that
    program(saying({**STALE, "SessionToken": "old", "Expiration": soon.isoformat()}))
    async with scripted(lambda _: parts_of(b"abc")) as server, opened(server.endpoint) as s3:
        await s3.get_range(NAME, 3, 3)
        await s3.get_range(NAME, 3, 3)
        program(saying({**GOOD, "AccessKeyId": "K2", "SessionToken": "new"}))
        await s3.get_range(NAME, 3, 3)
    tokens = [request.headers["x-amz-security-token"] for request in server.requests]
    assert tokens == ["old", "old", "new"]
    assert "Credential=K2/" in server.requests[-1].headers["authorization"]


async def test_anonymous_reads_are_not_signed() -> None:
    """Without credentials there is no signature."""
    async with (
        scripted(lambda _: parts_of(b"abc")) as server,
        opened(server.endpoint, anonymous=True) as s3,
    ):
        for _ in range(2):
            assert await s3.get_range(NAME, 3, 3) == b"abc"
    assert BOTOCORES_OWN not in server.requests[-1].headers
    assert "authorization" not in server.requests[-1].headers


@dataclass
class Prepared:
    """A request of botocore."""

    url: str = "https://bucket.s3.eu-north-1.amazonaws.com/folder/levels/1.sst"
    method: str = "GET"
    headers: dict[str, Any] = field(
        default_factory=lambda: {
            "Range": "bytes=0-1",
            "X-Amz-Date": b"20280101T000000Z",
            "X-Amz-Content-SHA256": EMPTY_SHA256,
            "User-Agent": "shalekv",
            "Authorization": b"AWS4-HMAC-SHA256 Credential=K/20280101/eu-north-1/s3/aws4_request, "
            b"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, Signature=00",
        }
    )


HTTP = cast("OneAttempt", object())
KEY = "folder/levels/1.sst"


def test_a_route_with_the_bucket_in_the_host() -> None:
    """Host, region and headers are those of botocore's request."""
    route = learnt_route(HTTP, Prepared(), KEY)
    assert route is not None
    assert (route.origin, route.path) == ("https://bucket.s3.eu-north-1.amazonaws.com", "/")
    assert route.headers == {"user-agent": "shalekv", "accept-encoding": "identity"}
    assert route.signer is not None
    signed = route.signer.headers("/key", "bytes=0-1", ReadOnlyCredentials("K", "S", None), 0.0)
    assert "Credential=K/19700101/eu-north-1/s3/aws4_request" in signed["authorization"]


@pytest.mark.parametrize(
    "request_",
    [
        Prepared(method="HEAD"),
        Prepared(url=Prepared().url + "?versionId=1"),
        Prepared(url=Prepared().url + "x"),
        Prepared(headers={**Prepared().headers, "x-amz-request-payer": "requester"}),
        Prepared(headers={**Prepared().headers, "x-amz-s3session-token": "t"}),
        Prepared(headers={**Prepared().headers, "Authorization": "AWS K:signature"}),
        Prepared(
            headers={
                **Prepared().headers,
                "Authorization": "AWS4-HMAC-SHA256 Credential=K/20280101/eu-north-1/s3express/"
                "aws4_request, SignedHeaders=host, Signature=00",
            }
        ),
    ],
    ids=["method", "query", "key", "payer", "session", "version-2", "express"],
)
def test_what_is_unknown_stays_with_botocore(request_: Prepared) -> None:
    """Nothing is learnt of a request that is unlike those that are sent here."""
    assert learnt_route(HTTP, request_, KEY) is None


def test_a_day_has_one_key() -> None:
    """The key of a day is derived once, and again for other credentials and the next day."""
    signer = Signer("host", "r", "s3")

    def signature(secret: str, now_s: float) -> str:
        headers = signer.headers("/k", "bytes=0-1", ReadOnlyCredentials("K", secret, None), now_s)
        return headers["authorization"].rpartition("=")[2]

    now_s = time.time()
    signatures = [signature(*at) for at in (("S", now_s), ("T", now_s), ("S", now_s + 86_400))]
    assert len({*signatures}) == 3
    assert [signature(*at) for at in (("S", now_s), ("T", now_s))] == signatures[:2]
