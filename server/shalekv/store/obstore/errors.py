"""The outcome of a failed request to Google or Azure.

obstore has few classes of errors: a list without permission, a range behind the end and a server
that is down are all `GenericError`, and a 409 of any meaning is `AlreadyExistsError`. The text of
the error has the details: the message, and after "Debug source:" the error as Rust prints it, with
each field on a line of its own. Names and replies are quoted there, including line ends, so that
no part of them can be mistaken for a field.

None of that text goes into our errors, because it shows addresses and replies, which may hold
tokens and signatures. Only the status and the store's code for the problem do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

from obstore.exceptions import InvalidPathError

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.store.api import Exists, Unknown

# Fields of Rust's text. The first `kind` is obstore's own; nested errors have others.
_STATUS = re.compile(r"^ +(?:status: |code: \")(\d{3})\"?,$", re.MULTILINE)  # code: in a batch
_KIND = re.compile(r"^ +kind: (\w+),$", re.MULTILINE)
_TOKEN = re.compile(r"^ +source: (?:Token\w+|FederatedTokenFile|AzureCli\w*)\b", re.MULTILINE)
_START_TOO_LARGE = re.compile(r"^ +source: StartTooLarge\b", re.MULTILINE)
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\\\"(?:reason|error)\\\": ?\\\"(\w{1,64})\\\"")

_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ResourceNotFound"})
_READS_OF_ONE = frozenset({"get", "get_range", "head"})
_REFUSED_FROM, _REFUSED_BELOW = 300, 500
_TRANSIENT = frozenset({408, 409, 412, 429})  # statuses in between after which a retry may succeed

_CLOCK = " and this machine's clock"
_BAD_NAME = "InvalidPath"
_SILENCES = {
    _BAD_NAME: "obstore takes no names with empty, '.' or '..' parts, and an object of another "
    "program has one: remove it with the provider's own tools",
    "Connect": "no connection could be made: check the endpoint and the network",
    "Timeout": "there was no answer in time",
    "Interrupted": "the connection was cut",
    "Request": "the connection was closed before the answer",
}
_SENT_ON = "it sends on to another address: check the endpoint"
_ADVICE = {
    400: f"check the bucket's name, the endpoint, the credentials{_CLOCK}",
    401: f"the credentials are missing, wrong or expired: check them{_CLOCK}",
    403: f"the credentials are wrong or expired, or lack a permission: check them{_CLOCK}",
    404: "there is no such bucket, or no such account: check the URL and the endpoint",
    429: "too many requests: the store asks for fewer",
    503: "the store is busy: it asks for fewer requests",
}


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One failed request."""

    status: int | None = None  # of the reply; None: there was none
    code: str = ""  # the store's code of the problem
    kind: str = ""  # obstore's kind of a failure without a reply
    is_token_failure: bool = False  # no token was given; nothing was sent for the object

    @property
    def is_refusal(self) -> bool:
        """Return whether an operator must fix something before a retry can succeed."""
        if self.kind == _BAD_NAME:
            return True
        if self.is_token_failure and self.status is None:
            return self.kind == ""  # no request: a file or a program that cannot be read
        if self.status is None or self.status in _TRANSIENT:
            return False
        return _REFUSED_FROM <= self.status < _REFUSED_BELOW

    @property
    def is_object_missing(self) -> bool:
        """Return whether the object was not found, and not the bucket."""
        if self.status != HTTPStatus.NOT_FOUND or self.is_token_failure:
            return False
        return self.code not in _NO_BUCKET

    @property
    def is_range_past_end(self) -> bool:
        """Return whether the object exists, and the range begins behind its end."""
        return (
            self.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and not self.is_token_failure
        )

    @property
    def problem(self) -> str:
        """Description for an error, without secrets."""
        if self.status is None:
            what = _SILENCES.get(self.kind, f"the connection failed ({self.kind or 'no detail'})")
        else:
            what = f"the answer was {self.status} {self.code}".rstrip()
        if self.is_token_failure:
            return f"no token could be had for the store: {what}; check the credentials{_CLOCK}"
        is_sent_on = self.status is not None and self.status < HTTPStatus.BAD_REQUEST
        advice = _SENT_ON if is_sent_on else _ADVICE.get(self.status or 0, "")
        return f"{what}: {advice}" if advice else what


def describe_failure(error: Exception) -> RequestFailure:
    """Return what an error of obstore says about its request."""
    if isinstance(error, TimeoutError):
        return RequestFailure(kind="Timeout")
    if isinstance(error, (InvalidPathError, ValueError)):
        return RequestFailure(kind=_BAD_NAME)
    _, is_there, source = str(error).rpartition("\nDebug source:\n")
    fields, _, body = source.partition("body: Some(") if is_there else ("", "", "")
    status = _STATUS.search(fields)
    kind = _KIND.search(fields)
    code = _CODE.search(body)
    found = RequestFailure(
        int(status[1]) if status else None,
        (code[1] or code[2]) if code else "",
        kind[1] if kind and not status else "",
        _TOKEN.search(fields) is not None,
    )
    if isinstance(error, FileNotFoundError) and found.status is None:
        return RequestFailure(HTTPStatus.NOT_FOUND)  # of one object in a batch
    if _START_TOO_LARGE.search(fields):
        # Azurite sends an empty part instead of a refusal, and obstore raises this error then.
        return RequestFailure(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
    return found


def create_outcome(failure: RequestFailure) -> Exists | Unknown | None:
    """Return the outcome of a failed create; None: nothing was created, so raise `store_error`."""
    if failure.is_token_failure or failure.kind == "Connect":
        return None
    is_azures = failure.status == HTTPStatus.CONFLICT and failure.code == "BlobAlreadyExists"
    if is_azures or failure.status == HTTPStatus.PRECONDITION_FAILED:
        return Exists()
    if failure.status == HTTPStatus.TOO_MANY_REQUESTS or failure.is_refusal:
        return None
    return Unknown(failure.problem)


def store_error(failure: RequestFailure, store: str, operation: str, name: str) -> StoreError:
    """Return the error to raise for a failed request."""
    if failure.is_object_missing and operation in _READS_OF_ONE:
        return ObjectNotFound(store, operation, name, "no object has this name")
    if not failure.is_refusal:
        return StoreUnavailable(store, operation, name, failure.problem)
    may_pass = failure.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
    return StoreRefused(store, operation, name, failure.problem, may_pass=may_pass)
