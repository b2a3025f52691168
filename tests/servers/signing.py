"""Signatures of requests to S3 (AWS Signature Version 4), for those who change a signed request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256 = hashlib.sha256().hexdigest()


def authorization(
    method: str,
    target: str,
    headers: Mapping[str, str],
    *,
    signed: Sequence[str],
    scope: str,
    access_key: str,
    secret_key: str,
) -> str:
    """The value of the header Authorization.

    `target` is the path and the query as they are sent; `headers` have lower-case names, with
    x-amz-date and x-amz-content-sha256; `signed` are the names of those that the signature covers;
    `scope` is DATE/REGION/SERVICE/aws4_request.
    """
    path, _, query = target.partition("?")
    names = sorted(signed)
    canonical = "\n".join(
        [
            method,
            path,
            "&".join(sorted(_with_equals(part) for part in query.split("&") if part)),
            *(f"{name}:{' '.join(headers[name].split())}" for name in names),
            "",
            ";".join(names),
            headers["x-amz-content-sha256"],
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join([ALGORITHM, headers["x-amz-date"], scope, digest])
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    signature = _hmac(key, text).hex()
    return (
        f"{ALGORITHM} Credential={access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )


def _with_equals(part: str) -> str:
    return part if "=" in part else f"{part}="


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
