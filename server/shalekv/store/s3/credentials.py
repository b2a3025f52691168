"""The credentials of a client: found, and renewed, before a request is made of them.

botocore would do both while it signs. What fails then looks like the store's own answer, though
nothing was sent to the store; and a client that has found none would never look again.
"""

from __future__ import annotations

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore import exceptions as boto

# What a source says may be no JSON, lack a key, have a time that is none, or be too old: botocore
# passes on whatever it runs into then.


class CredentialsFailed(Exception):
    """There are no credentials that are good now, because of `cause`. Nothing was sent."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(type(cause).__name__)
        self.cause = cause


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
