"""The credentials of a client: found, and renewed, before a request is made of them.

botocore would do both while it signs. What fails then looks like the store's own answer, though
nothing was sent to the store; and a client that has found none would never look again.
"""

from __future__ import annotations

import logging
import re

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore import exceptions as boto

# --- discretion
# Keeps secrets out of logs and of errors.


_TOKEN = re.compile(r"[A-Za-z0-9+/=_%-]{16,}")  # may be a key, a signature or a part of a query
_MESSAGE_CHARACTERS = 200


def keep_secrets_out_of_logs() -> None:
    """Below INFO, botocore logs requests with their signatures and tokens: that is never wanted.

    Nor is what it says of credentials at INFO, in each process: that it has found some. And the
    traceback of a source that failed ends with whatever that has said.
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
    """The beginning of what a server says, without what may be a secret."""
    return _TOKEN.sub("***", message)[:_MESSAGE_CHARACTERS]


def named(error: Exception) -> str:
    """The kind of an error; its text may hold what a URL or a process has said."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()


# --- aws_credentials


# Raised before anything is sent, until somebody mends the configuration.
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
# A program or a token for credentials that is not there will not come by itself.
_NO_SOURCE = (FileNotFoundError, PermissionError)
# 4xx of a service that gives out credentials, and that may pass.
_PASSING_CODES = frozenset(
    "IDPCommunicationError RequestLimitExceeded RequestThrottled RequestTimeout "
    "RequestTimeoutException SlowDown Throttling ThrottlingException TooManyRequests "
    "TooManyRequestsException".split()
)

# What a source says may be no JSON, lack a key, have a time that is none, or be too old: botocore
# passes on whatever it runs into then.


class CredentialsFailed(Exception):
    """There are no credentials that are good now, because of `cause`. Nothing was sent."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(type(cause).__name__)
        self.cause = cause

    @property
    def may_pass(self) -> bool:
        """Whether it may be different the next time, though nobody has mended anything."""
        if isinstance(self.cause, boto.ClientError):
            status, code = _answered(self.cause)
            return not 400 <= status < 500 or code in _PASSING_CODES  # noqa: PLR2004
        return not isinstance(self.cause, (*CONFIGURATION, *_NO_SOURCE))

    def told(self, place: object) -> str:
        """What is wrong with the credentials for `place`, and what to do, in words of our own.

        What the source has said may be a secret.
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
    """What to do about `error`, one of `CONFIGURATION`."""
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
    """Those that clients of `session` will use; raises `CredentialsFailed`."""
    try:
        found: AioCredentials | None = await session.get_credentials()
    except Exception as error:  # noqa: BLE001 - see above
        raise CredentialsFailed(error) from None
    if found is None:
        raise CredentialsFailed(boto.NoCredentialsError())
    return found


async def renew_credentials(credentials: AioCredentials) -> None:
    """Have them good for a while, which takes a request when they are old.

    Raises `CredentialsFailed`.
    """
    try:
        await credentials.get_frozen_credentials()
    except Exception as error:  # noqa: BLE001 - see above
        raise CredentialsFailed(error) from None


# --- region
# Where a region comes from when no setting names one.


DEFAULT_REGION = "us-east-1"

# botocore looks at AWS_DEFAULT_REGION alone; every other kit of Amazon's knows AWS_REGION.
REGION_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}
