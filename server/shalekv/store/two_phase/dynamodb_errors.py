"""What an error of DynamoDB, or of the way there, says about the request that it answers."""

from __future__ import annotations

import socket

from aiohttp import ClientConnectorCertificateError, ClientConnectorError
from aiohttp import ClientError as HttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    NoRegionError,
    ParamValidationError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from shalekv.store.aws.discretion import masked, named
from shalekv.store.aws_credentials import CONFIGURATION, CredentialsFailed, not_configured
from shalekv.store.two_phase.answers import Answer


class NoAnswer(Exception):
    """Something else than an answer of DynamoDB; the text is in words of our own."""

    def __init__(self, problem: str, answer: Answer) -> None:
        super().__init__(problem)
        self.answer = answer


FAILURES = (
    ClientError,
    BotoCoreError,
    ResponseParserError,
    HttpError,
    OSError,
    CredentialsFailed,
    NoAnswer,
)

SERVER_ERROR = 500
CONFLICT = "ConditionalCheckFailedException"
PASSING = frozenset(
    {
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "ResourceInUseException",
        "ResourceNotFoundException",  # the table is being made, or was deleted
        "SlowDown",
        "ThrottlingException",
        "TransactionConflictException",
    }
)
NEVER_SENT = (ConnectTimeoutError, ProxyConnectionError)
# aiobotocore says EndpointConnectionError of a connection that was cut, too: its cause tells.
NO_CONNECTION = (ClientConnectorError, socket.gaierror)
MISSING = (*CONFIGURATION, NoRegionError, ParamValidationError)


def answer_in(error: Exception) -> Answer:
    """What `error`, one of `FAILURES`, says about the request that it was raised by.

    A failure on the way may have come before or after the request was sent: nobody knows.
    """
    if isinstance(error, CredentialsFailed):
        return Answer.NOT_DONE if error.may_pass else Answer.REFUSED
    if isinstance(error, NoAnswer):
        return error.answer
    if isinstance(error, MISSING):
        return Answer.REFUSED
    if isinstance(error, NEVER_SENT) or isinstance(_cause(error), NO_CONNECTION):
        return Answer.NOT_DONE
    if not isinstance(error, ClientError):
        return Answer.UNKNOWN
    status, code = _answered(error)
    if status >= SERVER_ERROR:
        return Answer.UNKNOWN
    if code == CONFLICT:
        return Answer.CONFLICT
    return Answer.NOT_DONE if code in PASSING else Answer.REFUSED


def problem_in(error: Exception, place: str) -> str:
    """What is wrong, in words of our own: those of others may hold tokens and signatures."""
    if isinstance(error, CredentialsFailed):
        return error.told(place)
    if isinstance(error, NoAnswer):
        return str(error)
    if isinstance(error, CONFIGURATION):
        return not_configured(error, place)
    if isinstance(error, ClientError):
        status, code = _answered(error)
        said = masked(error.response.get("Error", {}).get("Message", ""))
        return f"answered {status} {code}" + (f": {said}" if said else "")
    cause = _cause(error)
    if isinstance(cause, ClientConnectorCertificateError):
        return "the server's certificate is not trusted: see AWS_CA_BUNDLE"
    if isinstance(cause, ClientConnectorError):
        return f"cannot connect: {cause.strerror or named(cause)}. Is it up, and its address right?"
    return f"the request broke off: {named(cause)}"


def _answered(error: ClientError) -> tuple[int, str]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", SERVER_ERROR)
    return status, error.response.get("Error", {}).get("Code", "")


def _cause(error: Exception) -> Exception:
    """What aiohttp raised, where botocore hides it."""
    inner = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
    return inner if isinstance(inner, Exception) else error
