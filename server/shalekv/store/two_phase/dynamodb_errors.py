"""What an error of DynamoDB, or of the way there, says about the request that it answers."""

from __future__ import annotations

import socket

from aiohttp import ClientConnectorError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProxyConnectionError,
)

from shalekv.store.two_phase.answers import Answer

FAILURES = (ClientError, BotoCoreError, OSError)

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
MISSING = (
    CredentialRetrievalError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
)


def answer_in(error: Exception) -> Answer:
    """What `error` says about the request that it was raised by.

    A failure on the way may have come before or after the request was sent: nobody knows.
    """
    if isinstance(error, MISSING):
        return Answer.REFUSED
    cause = error.kwargs.get("error") if isinstance(error, EndpointConnectionError) else None
    if isinstance(error, NEVER_SENT) or isinstance(cause, NO_CONNECTION):
        return Answer.NOT_DONE
    if not isinstance(error, ClientError):
        return Answer.UNKNOWN
    code = error.response.get("Error", {}).get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", SERVER_ERROR)
    if status >= SERVER_ERROR:
        return Answer.UNKNOWN
    if code == CONFLICT:
        return Answer.CONFLICT
    return Answer.NOT_DONE if code in PASSING else Answer.REFUSED
