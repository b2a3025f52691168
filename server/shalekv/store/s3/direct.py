"""Reads of parts of objects in S3, sent without botocore.

botocore takes more than a millisecond of CPU to prepare, sign, send and parse a GET. This sends the
same request, over the same connections, in a fifth of that. It sends nothing else: what has a
condition, a body or a list stays with botocore.

Everything that a configuration decides is still botocore's: a `Route` is learnt from a GET that
botocore has sent, with its host, region and headers. If that GET has anything that is unknown here,
such as another kind of signature, nothing is learnt, and botocore sends the next one, too.

Signatures are those of AWS Signature Version 4.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from yarl import URL

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

    from shalekv.store.s3.client import OneAttempt

ERROR_STATUS_MIN = 300  # redirections are not followed
EMPTY_SHA256 = hashlib.sha256().hexdigest()  # of the body
UNESCAPED = "/-._~"  # what S3 leaves in a path as it is, beside letters and digits

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^/]+/\d{8}/([^/]+)/(s3)/aws4_request, ?SignedHeaders=.*"
)
# Headers of botocore's request that are written anew here, or that nobody needs.
_OWN = frozenset({"host", "range", "x-amz-date", "x-amz-content-sha256", "authorization"})
_NEEDLESS = frozenset({"amz-sdk-invocation-id", "amz-sdk-request", "accept-encoding"})
_TOKEN = "x-amz-security-token"  # noqa: S105 - the name of a header
_KEPT = frozenset({"user-agent", "x-tigris-consistent"})
_PLAIN = re.compile(r"[A-Za-z0-9/._~-]*")  # a key that is written in a path as it is
_ERROR_FIELD = re.compile(rb"<(Code|Message|Region)>([^<]{0,1000})</")


@dataclass(frozen=True, slots=True)
class RangeReply:
    """The reply to a GET with a range."""

    status: int
    headers: Mapping[str, str]  # names in any case
    data: bytes

    @property
    def is_error(self) -> bool:
        """Return whether the bytes describe an error."""
        return self.status >= ERROR_STATUS_MIN

    def as_error(self) -> dict[str, Any]:
        """Return an error as botocore parses it; without a code in the body it is the status."""
        details = {
            name.decode(): value.decode(errors="replace")
            for name, value in _ERROR_FIELD.findall(self.data)
        }
        lower = {name.lower(): value for name, value in self.headers.items()}
        return {
            "Error": {"Code": str(self.status), **details},
            "ResponseMetadata": {"HTTPStatusCode": self.status, "HTTPHeaders": lower},
        }


class Signer:
    """Signs GETs for one host, region and service."""

    def __init__(self, host: str, region: str, service: str) -> None:
        """`host` with the port, if it is not that of the scheme."""
        self._host = host
        self._region = region
        self._service = service
        self._key = b""
        self._key_of = ("", "")  # day and secret
        self._moment = ""
        self._moment_of = -1  # second since the Unix epoch

    def headers(
        self, path: str, wanted: str, credentials: ReadOnlyCredentials, now_s: float
    ) -> dict[str, str]:
        """Return the headers of a GET of `path`, percent-encoded, for the range `wanted`."""
        moment = self._moment_at(int(now_s))
        signed = {  # in the order of their names, in which they are signed
            "host": self._host,
            "range": wanted,
            "x-amz-content-sha256": EMPTY_SHA256,
            "x-amz-date": moment,
        }
        if credentials.token:
            signed[_TOKEN] = credentials.token
        names = ";".join(signed)
        lines = "".join([f"{name}:{value}\n" for name, value in signed.items()])
        request = f"GET\n{path}\n\n{lines}\n{names}\n{EMPTY_SHA256}"
        day = moment[:8]
        scope = f"{day}/{self._region}/{self._service}/aws4_request"
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
        key = self._key_for(day, credentials.secret_key or "")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        signed["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def _moment_at(self, now_s: int) -> str:
        """Return a time as it is signed: the same text for a second."""
        if now_s != self._moment_of:
            self._moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
            self._moment_of = now_s
        return self._moment

    def _key_for(self, day: str, secret: str) -> bytes:
        """Return the key of a day, which is the same for all requests."""
        if self._key_of != (day, secret):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, self._service, "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._key, self._key_of = key, (day, secret)
        return self._key


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a GET to the objects of one bucket, as botocore goes it."""

    http: OneAttempt
    origin: str  # scheme and host
    path: str  # of all objects, before their key, percent-encoded
    signer: Signer | None  # None: requests are not signed
    headers: Mapping[str, str]  # the same in each request

    async def get_part(
        self, key: str, wanted: str, credentials: ReadOnlyCredentials | None
    ) -> RangeReply:
        """Send one GET for the range `wanted` of an object. Raises the errors of aiohttp.

        REQUIRES: there are `credentials` if requests are signed.
        """
        escaped = key if _PLAIN.fullmatch(key) else quote(key, safe=UNESCAPED)
        path = self.path + escaped
        if self.signer is None or credentials is None:
            headers = {"range": wanted}
        else:
            headers = self.signer.headers(path, wanted, credentials, time.time())
        url = URL(self.origin + path, encoded=True)
        headers.update(self.headers)
        return RangeReply(*await self.http.get_signed(url, headers))


def learnt_route(http: OneAttempt, request: Any, key: str) -> Route | None:
    """Return the route of a GET of the object `key` that botocore sends by `http`.

    None: it has something that is unknown here.
    """
    parts = urlsplit(request.url)
    escaped = quote(key, safe=UNESCAPED)
    if request.method != "GET" or parts.query or not parts.path.endswith(f"/{escaped}"):
        return None
    headers = {name.lower(): _text(value) for name, value in request.headers.items()}
    if headers.keys() - _OWN - _NEEDLESS - _KEPT - {_TOKEN}:
        return None
    signer = None
    authorization = headers.get("authorization")
    if authorization is not None:
        match = _AUTHORIZATION.fullmatch(authorization)
        if match is None:
            return None
        signer = Signer(parts.netloc, match[1], match[2])
    kept = {name: value for name, value in headers.items() if name in _KEPT}
    origin = f"{parts.scheme}://{parts.netloc}"
    path = parts.path.removesuffix(escaped)
    return Route(http, origin, path, signer, {**kept, "accept-encoding": "identity"})


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
