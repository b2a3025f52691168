"""Address and credentials of a server that speaks S3, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import HTTPError
from urllib.request import Request, urlopen

REQUEST_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """Address and credentials of a server; buckets are part of the path, not of the host."""

    endpoint: str
    access_key: str = "shalekv"
    secret_key: str = "shalekv-secret"
    region: str = "us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which a process finds the credentials by itself."""
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
        """The body of the reply to a signed request; raises what urllib does."""
        described = {"content-type": "application/octet-stream", **(headers or {})}
        signed = self._sign(method, target, body, described)
        request = Request(self.endpoint + target, body or None, signed, method=method)  # noqa: S310 - it is http://127.0.0.1
        try:
            with urlopen(request, timeout=REQUEST_S) as reply:  # noqa: S310 - as above
                return bytes(reply.read())
        except HTTPError as error:
            with error:
                error.add_note(error.read().decode(errors="replace"))
            raise

    def _sign(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> dict[str, str]:
        """`headers`, and those that sign the request."""
        from botocore.auth import S3SigV4Auth  # noqa: PLC0415 - it is slow
        from botocore.awsrequest import AWSRequest  # noqa: PLC0415 - as above
        from botocore.credentials import Credentials  # noqa: PLC0415 - as above

        request = AWSRequest(method, self.endpoint + target, dict(headers), body)
        keys = Credentials(self.access_key, self.secret_key)
        S3SigV4Auth(keys, "s3", self.region).add_auth(request)
        return dict(request.headers.items())
