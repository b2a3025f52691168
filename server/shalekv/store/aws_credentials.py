"""Credentials and region of botocore clients; keeps their secrets out of errors and logs.

Credentials are found and renewed before each request. botocore would do both while it signs: a
failure would then look like an answer of the store, though nothing was sent to the store, and a
client that has found no credentials would never look for them again.
"""

from __future__ import annotations

import logging
import re

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore import exceptions as boto
from botocore.credentials import ReadOnlyCredentials

DEFAULT_REGION = "us-east-1"

# Where a region comes from without a setting. botocore reads only AWS_DEFAULT_REGION; the other
# SDKs of Amazon read AWS_REGION.
REGION_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}

# Errors of the configuration. They are raised before anything is sent, until somebody fixes it.
CONFIGURATION = (
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.InvalidConfigError,
    boto.InvalidRegionError,
    boto.NoAuthTokenError,
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.SSOError,
    boto.TokenRetrievalError,
    boto.UnknownCredentialError,
)
# The program or the token file for credentials is missing: a retry does not help.
_NO_SOURCE = (FileNotFoundError, PermissionError)
# Transient errors, with a status of 4xx, of a service that issues credentials.
_TRANSIENT_CODES = frozenset(
    "IDPCommunicationError RequestLimitExceeded RequestThrottled RequestTimeout "
    "RequestTimeoutException SlowDown Throttling ThrottlingException TooManyRequests "
    "TooManyRequestsException".split()
)

_TOKEN = re.compile(r"[A-Za-z0-9+/=_%-]{16,}")  # may be a key, a signature or a part of a query
_MESSAGE_CHARACTERS = 200


def keep_secrets_out_of_logs() -> None:
    """Raise the log levels of botocore, and drop tracebacks from its logs of credentials.

    Below INFO, botocore logs requests with their signatures and tokens. At INFO, it logs in each
    process that it has found credentials, which is only noise. The traceback of a source of
    credentials that failed ends with the output of that source, which may be a secret.
    """
    for name in ("botocore", "aiobotocore"):
        for logger, least in (
            (logging.getLogger(name), logging.INFO),
            (logging.getLogger(f"{name}.credentials"), logging.WARNING),
        ):
            if logger.getEffectiveLevel() < least:
                logger.setLevel(least)
        logging.getLogger(f"{name}.credentials").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True


def masked(message: str) -> str:
    """Return the beginning of a server's message, with everything masked that may be a secret."""
    return _TOKEN.sub("***", message)[:_MESSAGE_CHARACTERS]


def named(error: Exception) -> str:
    """Return the kind of an error in words. Its text is left out: it may hold a secret."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()


class CredentialsFailed(Exception):
    """There are no valid credentials, because of `cause`. Nothing was sent to the store."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(type(cause).__name__)
        self.cause = cause

    @property
    def may_pass(self) -> bool:
        """Return whether a retry may succeed without any change by an operator."""
        if isinstance(self.cause, boto.ClientError):
            status, code = _answered(self.cause)
            return not 400 <= status < 500 or code in _TRANSIENT_CODES  # noqa: PLR2004
        return not isinstance(self.cause, (*CONFIGURATION, *_NO_SOURCE))

    def describe(self, place: object) -> str:
        """Say what is wrong with the credentials for `place`, and what to do.

        The text is our own, since the message of the source may hold a secret.
        """
        if isinstance(self.cause, CONFIGURATION):
            return not_configured(self.cause, place)
        source = f"the source of credentials for {place}"
        if isinstance(self.cause, boto.ClientError):
            status, code = _answered(self.cause)
            answered = f"{source} answered {status} {code}"
            return answered if self.may_pass else f"{answered}: check the role and its token"
        failed = f"{source} failed: {named(self.cause)}"
        return failed if self.may_pass else f"{failed}: check what AWS's files and variables name"


def not_configured(error: Exception, place: object) -> str:
    """Say what to do about `error`, one of `CONFIGURATION`."""
    is_none = isinstance(error, boto.NoCredentialsError)
    why = "no credentials were found" if is_none else named(error)
    return (
        f"no request could be sent: {why}. Set the credentials and the region of {place} "
        "in the environment or in AWS's files"
    )


def _answered(error: boto.ClientError) -> tuple[int, str]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, error.response.get("Error", {}).get("Code", "")


async def find_credentials(session: AioSession) -> AioCredentials:
    """Find the credentials that clients of `session` will use. Raises `CredentialsFailed`.

    The reply of a source may be no JSON, lack a key, have an invalid time, or be expired. botocore
    then raises any kind of error.
    """
    try:
        found: AioCredentials | None = await session.get_credentials()
    except Exception as error:  # noqa: BLE001 - see the docstring
        raise CredentialsFailed(error) from None
    if found is None:
        raise CredentialsFailed(boto.NoCredentialsError())
    return found


async def credentials_source(profile: str) -> str:
    """Name the source of the credentials, as botocore calls it. Raises `CredentialsFailed`."""
    found = await find_credentials(AioSession(profile=profile or None))
    return str(found.method)


async def renew_credentials(credentials: AioCredentials) -> ReadOnlyCredentials:
    """Return credentials that stay valid for a while; this takes a request when they are old.

    Raises `CredentialsFailed`, for any error as in `find_credentials`.
    """
    try:
        return await credentials.get_frozen_credentials()
    except Exception as error:  # noqa: BLE001 - see the docstring
        raise CredentialsFailed(error) from None
