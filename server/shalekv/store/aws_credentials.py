"""The credentials of a client: found, and renewed, before a request is made of them.

botocore would do both while it signs. What fails then looks like the store's own answer, though
nothing was sent to the store; and a client that has found none would never look again.
"""

from __future__ import annotations

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore import exceptions as boto

from shalekv.store.aws.discretion import named

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
