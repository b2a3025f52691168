"""What requests say beyond what botocore makes them say, and what it must not do to them."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

TIGRIS_HOSTS = (".tigris.dev", ".storage.dev")


def is_tigris(url: str) -> bool:
    """Whether the host of `url` is one of Tigris's, which wants the bucket in it."""
    return f".{urlsplit(url).hostname or ''}".endswith(TIGRIS_HOSTS)


def register_headers(client: S3Client) -> None:
    """Have `client` call the functions below before it signs."""
    events = client.meta.events
    events.register("before-call.s3", _stay_in_region)
    events.register("before-call.s3", _be_consistent)
    events.register("before-call.s3.DeleteObjects", _add_md5)


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    # A bucket in another region: botocore would ask where it is and send the request again, for
    # every process that was configured wrongly, uncounted. So: it was redirected already.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _be_consistent(params: dict[str, Any], **_: Any) -> None:
    # Tigris answers from the nearest copy, which may be behind, unless it is asked not to.
    if is_tigris(params["url"]):
        params["headers"]["X-Tigris-Consistent"] = "true"


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    # The one request that must have a checksum. All servers take an MD5, as S3 once demanded;
    # botocore's CRC-32 instead is refused by many: "Missing required header: Content-MD5".
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
    params["context"].get("checksum", {}).pop("request_algorithm", None)
