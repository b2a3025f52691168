"""The outcome of a failed request to S3, and what a user can do about it.

Errors are described in our own words: a server's message may hold the key, and the headers of a
request hold signatures and tokens.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.store.aws_credentials import (
    CONFIGURATION,
    CredentialsFailed,
    masked,
    named,
    not_configured,
)


@dataclass(frozen=True, slots=True)
class S3Place:
    """The destination of requests, as errors may show it."""

    bucket: str
    endpoint: str  # of the provider, or the configured one
    region: str

    def __str__(self) -> str:
        """For the middle of a sentence."""
        return f"bucket {self.bucket} at {self.endpoint}"


# Names of the permissions for each operation, in policies as Amazon writes them.
_PERMISSIONS: Final = {
    "create": "s3:PutObject and s3:AbortMultipartUpload",
    "put": "s3:PutObject and s3:AbortMultipartUpload",
    "copy": "s3:GetObject and s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "abort": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
    "versioning": "s3:GetBucketVersioning",
    "versions": "s3:ListBucketVersions",
    "lifecycle": "s3:GetLifecycleConfiguration",
    "lock": "s3:GetBucketObjectLockConfiguration",
}
_READING: Final = "s3:GetObject and s3:ListBucket"
# Operations whose name is no verb for a sentence.
_DOING: Final = {
    "now": "ask for the time",
    "versioning": "see the versioning",
    "versions": "list versions",
    "lifecycle": "see the lifecycle rules",
    "lock": "see the object lock",
}

_DENIED: Final = "these credentials may not {operation} in {place}: they need {permissions}"
_WRONG_REGION: Final = (
    "{place} is in another region than {region}: set --region{to}, and leave --endpoint-url out "
    "unless it is that region's"
)
_NO_BUCKET: Final = "there is no {place}: check both names, or create the bucket"
_UNKNOWN_KEY: Final = "{place} does not know the access key: check which credentials are set"
_EXPIRED: Final = "the credentials for {place} have expired, or their token is wrong: renew them"

REFUSALS: Final = {
    "AccessDenied": _DENIED,
    "AccessDeniedException": _DENIED,
    "AllAccessDisabled": _DENIED,
    "UnauthorizedAccess": _DENIED,
    "Unauthorized": _DENIED,
    "AccountProblem": "the account of {place} has a problem: see the provider's console",
    "NotSignedUp": "the account of {place} is not signed up: see the provider's console",
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "InvalidClientTokenId": _UNKNOWN_KEY,
    "XAdminUserNotFound": _UNKNOWN_KEY,  # of versitygw, as a 404
    "SignatureDoesNotMatch": "the secret key for {place} is wrong, or a proxy changes requests",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": "{place} cannot be a bucket: its name is not allowed there",
    "PermanentRedirect": _WRONG_REGION,
    "AuthorizationHeaderMalformed": _WRONG_REGION,
    "IllegalLocationConstraintException": _WRONG_REGION,
    "MethodNotAllowed": "{place} does not allow to {operation}: is it an S3 server and bucket?",
}

# Refusals of every request, with any credentials: the URL or the endpoint is wrong.
MISPLACED: Final = frozenset(
    {
        "NoSuchBucket",
        "InvalidBucketName",
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "MethodNotAllowed",
    }
)


def refusal(code: str, place: S3Place, operation: str, region: str | None = None) -> str:
    """Describe a refusal and what to do. `region` is that of the bucket, if the store named it."""
    return REFUSALS[code].format(
        operation=_DOING.get(operation, operation),
        place=place,
        permissions=_PERMISSIONS.get(operation, _READING),
        region=place.region or "the one that requests are signed for",
        to=f" {region}" if region else "",
    )


# All errors that botocore and aiohttp raise when a request fails.
FAILURES = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    OSError,
    CredentialsFailed,
)


class RequestOutcome(enum.Enum):
    """Outcome of a failed request."""

    ABSENT = "absent"  # no object has the name
    EXISTS = "exists"  # the condition did not hold
    BEHIND_THE_END = "behind the end"  # the object exists, but not this range
    NOT_APPLIED = "not applied"  # it was not sent, or could not take effect; a retry may succeed
    UNCERTAIN = "uncertain"  # it may have been applied, or may be later
    REFUSED = "refused"  # not applied, and a retry alone does not help


_CONNECTING = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

# Transient errors, with a status of 4xx: the request was damaged, late, one of too many, or in
# conflict with another one.
_TRANSIENT_CODES = frozenset(
    "BadDigest ConditionalRequestConflict IDPCommunicationError IncompleteBody OperationAborted "
    "RequestThrottled "
    "RequestTimeout RequestTimeoutException SlowDown Throttling ThrottlingException "
    "TooManyRequests XAmzContentChecksumMismatch XAmzContentSHA256Mismatch".split()
)
# Codes of a 404 about an object; a reply to HEAD has only the status. A 404 with another code is
# about something else that is missing, such as a user. One without a code comes from a proxy that
# finds no server behind it: the object may exist.
_NO_OBJECT = frozenset({"NoSuchKey", "NoSuchUpload", "NotFound"})
_NO_CODE = frozenset({"", "404"})
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
_NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The outcome of a failed request, and its reason."""

    outcome: RequestOutcome
    problem: str
    may_pass: bool = False  # of a refusal: it may be transient

    def error(self, store: str, operation: str, name: str) -> StoreError:
        """Return the error for callers that make no use of the outcome."""
        match self.outcome:
            case RequestOutcome.ABSENT:
                return ObjectNotFound(store, operation, name, "no object has this name")
            case RequestOutcome.REFUSED | RequestOutcome.BEHIND_THE_END:
                return StoreRefused(store, operation, name, self.problem, may_pass=self.may_pass)
            case RequestOutcome.NOT_APPLIED | RequestOutcome.UNCERTAIN | RequestOutcome.EXISTS:
                return StoreUnavailable(store, operation, name, self.problem)


class Failed(Exception):
    """A request did not succeed."""

    def __init__(self, failure: FailedRequest) -> None:
        super().__init__(failure.problem)
        self.failure = failure


def judge(error: Exception, place: S3Place, operation: str) -> FailedRequest:
    """Judge a request of `operation` that raised `error`, one of `FAILURES`."""
    if isinstance(error, CredentialsFailed):
        return _judge_credentials(error, place)
    if isinstance(error, boto.ClientError):
        is_head = error.operation_name == "HeadObject"
        return judge_reply(error.response, place, operation, is_head=is_head)
    if isinstance(error, CONFIGURATION):
        return _not_configured(not_configured(error, place))
    return _judge_connection(error, place)


def _judge_credentials(error: CredentialsFailed, place: S3Place) -> FailedRequest:
    """Judge a failure of the credentials: nothing was sent to the store.

    If there was an answer, it came from the service that issues credentials.
    """
    problem = error.describe(place)
    if isinstance(error.cause, CONFIGURATION):
        return _not_configured(problem)
    outcome = RequestOutcome.NOT_APPLIED if error.may_pass else RequestOutcome.REFUSED
    return FailedRequest(outcome, problem, may_pass=True)


def _not_configured(problem: str) -> FailedRequest:
    return FailedRequest(RequestOutcome.REFUSED, f"{problem}, or use --anonymous")


def _judge_connection(error: Exception, place: S3Place) -> FailedRequest:
    cause = _cause(error)
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        problem = f"the certificate of {place.endpoint} is not trusted: see AWS_CA_BUNDLE"
        return FailedRequest(RequestOutcome.REFUSED, problem)
    if isinstance(error, (boto.ConnectTimeoutError, aiohttp.ConnectionTimeoutError)):
        problem = f"no connection to {place.endpoint} in time: is it up, and is this its address?"
        return FailedRequest(RequestOutcome.NOT_APPLIED, problem)
    if isinstance(error, boto.ProxyConnectionError) or isinstance(cause, _CONNECTING):
        os_error = getattr(cause, "os_error", None)
        reason = getattr(os_error, "strerror", None) or named(cause)
        problem = f"cannot connect to {place.endpoint}: {reason}. Is it up, and its address right?"
        return FailedRequest(RequestOutcome.NOT_APPLIED, problem)
    if isinstance(error, (boto.ReadTimeoutError, asyncio.TimeoutError)):
        return FailedRequest(RequestOutcome.UNCERTAIN, f"{place.endpoint} did not answer in time")
    broke_off = f"{place.endpoint} broke off the request: {named(cause)}"
    return FailedRequest(
        RequestOutcome.UNCERTAIN, f"{broke_off}. If it always does: is it an S3 server?"
    )


def judge_reply(
    reply: Mapping[str, Any], place: S3Place, operation: str, *, is_head: bool = False
) -> FailedRequest:
    """Judge an error that the store has answered; `reply` is as botocore parses it."""
    details = reply.get("Error", {})
    metadata = reply.get("ResponseMetadata", {})
    code = str(details.get("Code", ""))
    status = int(metadata.get("HTTPStatusCode", 0))
    if code == "RequestTimeTooSkewed":
        return FailedRequest(
            RequestOutcome.REFUSED, _skew(metadata.get("HTTPHeaders", {})), may_pass=True
        )
    if code in REFUSALS:
        region = details.get("Region") or metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region")
        problem = refusal(code, place, operation, region)
        return FailedRequest(RequestOutcome.REFUSED, problem, may_pass=code not in MISPLACED)
    if is_head and status == 404 and code in _NO_CODE:  # noqa: PLR2004
        return FailedRequest(RequestOutcome.ABSENT, f"{place.endpoint} answered {status}")
    if not is_head and status == 500 and code in {"", "500"}:  # noqa: PLR2004
        # botocore turns a success without XML, such as a page for people, into this error.
        problem = f"{place.endpoint} answered 500, or what S3 never does: is it an S3 server?"
        return FailedRequest(RequestOutcome.UNCERTAIN, problem)
    return _judge_status(status, code, str(details.get("Message", "")), place, operation)


def judge_part(details: Mapping[str, Any], place: S3Place, operation: str) -> FailedRequest:
    """Judge the error about one object of a batch, in a reply that is a success as a whole."""
    code = str(details.get("Code", ""))
    if code in REFUSALS:
        problem = refusal(code, place, operation)
        return FailedRequest(RequestOutcome.REFUSED, problem, may_pass=code not in MISPLACED)
    outcome = RequestOutcome.ABSENT if code == "NoSuchKey" else RequestOutcome.UNCERTAIN
    return FailedRequest(outcome, f"{place.endpoint} answered {code}")


def _judge_status(
    status: int, code: str, message: str, place: S3Place, operation: str
) -> FailedRequest:
    answer = f"{place.endpoint} answered {status}" + (f" {code}" if code != str(status) else "")
    if status == 412:  # noqa: PLR2004 - the numbers of HTTP are their names
        return FailedRequest(RequestOutcome.EXISTS, answer)
    if status == 404 and code in _NO_OBJECT:  # noqa: PLR2004
        return FailedRequest(RequestOutcome.ABSENT, answer)
    if status == 416:  # noqa: PLR2004
        return FailedRequest(RequestOutcome.BEHIND_THE_END, answer)
    if status == 404 and code in _NO_CODE:  # noqa: PLR2004
        return FailedRequest(
            RequestOutcome.UNCERTAIN, f"{answer}, and not as S3 does: is it an S3 server?"
        )
    if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUSES or 300 <= status < 400:  # noqa: PLR2004
        return FailedRequest(RequestOutcome.UNCERTAIN, answer)
    if status == _NOT_IMPLEMENTED:
        problem = (
            f"{answer}: it lacks what {operation} needs. A store without conditional writes is "
            "used with --cas two_phase"
        )
        return FailedRequest(RequestOutcome.REFUSED, problem)
    if status in {401, 403}:
        problem = f"{answer}. {refusal('AccessDenied', place, operation)}"
        return FailedRequest(RequestOutcome.REFUSED, problem, may_pass=True)
    if 400 <= status < 500:  # noqa: PLR2004
        said = masked(message)
        return FailedRequest(RequestOutcome.REFUSED, f"{answer}: {said}" if said else answer)
    return FailedRequest(RequestOutcome.UNCERTAIN, answer)


def _skew(headers: Mapping[str, str]) -> str:
    try:
        store_s = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return "the clock of this machine is wrong by too much for the store: set it, as NTP does"
    # botocore signs by the same clock.
    ahead_s = round(time.time() - store_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    return f"the clock of this machine is {abs(ahead_s)} s {side} the store's: set it, as NTP does"


def _cause(error: Exception) -> Exception:
    """Return the error of aiohttp where botocore wraps one, else `error`."""
    inner = getattr(error, "kwargs", {}).get("error")
    return inner if isinstance(inner, Exception) else error
