"""What a test knows of a server that speaks S3, whichever it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tests.servers.signing import authorization

REQUEST_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens, and who may use it; buckets are part of the path, not of the host."""

    endpoint: str
    access_key: str = "shalekv"
    secret_key: str = "shalekv-secret"
    region: str = "us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to find the credentials by itself."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")

    def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of the reply to a signed request; raises what urllib does.

        The names of `headers` are in lower case.
        """
        described = {"content-type": "application/octet-stream", **(headers or {})}
        described["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
        signed = self.sign(method, target, described)
        request = Request(self.endpoint + target, body or None, signed, method=method)  # noqa: S310 - it is http://127.0.0.1
        try:
            with urlopen(request, timeout=REQUEST_S) as reply:  # noqa: S310 - as above
                return bytes(reply.read())
        except HTTPError as error:
            with error:
                error.add_note(error.read().decode(errors="replace"))
            raise

    def sign(
        self, method: str, target: str, headers: Mapping[str, str], *, service: str = "s3"
    ) -> dict[str, str]:
        """`headers`, whose names are in lower case, and those that sign the request."""
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        signed = {"host": urlsplit(self.endpoint).netloc, **headers, "x-amz-date": now}
        signed["authorization"] = authorization(
            method,
            target,
            signed,
            signed=list(signed),  # no server minds that more is signed than must be
            scope=f"{now[:8]}/{self.region}/{service}/aws4_request",
            access_key=self.access_key,
            secret_key=self.secret_key,
        )
        return signed
