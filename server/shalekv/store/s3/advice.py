"""What to do about a refusal, by the code that the store gave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, as it may stand in an error."""

    bucket: str
    endpoint: str  # of the provider, or the configured one
    region: str

    def __str__(self) -> str:
        """For the middle of a sentence."""
        return f"bucket {self.bucket} at {self.endpoint}"


# What a permission for an operation is called, in policies of Amazon's kind.
_PERMISSIONS: Final = {
    "create": "s3:PutObject and s3:AbortMultipartUpload",
    "put": "s3:PutObject and s3:AbortMultipartUpload",
    "copy": "s3:GetObject and s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "abort": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
}
_READING: Final = "s3:GetObject and s3:ListBucket"
# Operations whose name does not do in a sentence.
_DOING: Final = {"now": "ask for the time"}

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

# Refusals of any request, whoever sends it: the URL or the endpoint is wrong.
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


def refusal(code: str, place: Place, operation: str, region: str | None = None) -> str:
    """The problem, and what to do. `region` is that of the bucket, where the store has told."""
    return REFUSALS[code].format(
        operation=_DOING.get(operation, operation),
        place=place,
        permissions=_PERMISSIONS.get(operation, _READING),
        region=place.region or "the one that requests are signed for",
        to=f" {region}" if region else "",
    )
