"""Creates the bucket of SHALEKV_DATABASE__URL once the S3 server answers; done if it is there.

For the S3 server of compose.yaml, which begins empty. Settings and credentials are found as by
`shalekv serve`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.errors import ShaleError
from shalekv.settings import Settings, StoreSettings, UrlSettings
from shalekv.store.url import BucketUrl, Provider, parse_url

ANSWER_S = 60.0
POLL_S = 0.5
REQUEST_S = 5
REGION = "us-east-1"  # where a bucket is that names no other place


class _Place(Settings):
    database: UrlSettings
    store: StoreSettings = StoreSettings()


def main() -> None:
    """Make the bucket; what went wrong, and exit code 1, otherwise."""
    try:
        file = os.environ.get(CONFIG_VARIABLE)
        settings = load_settings({}, Path(file) if file else None, _Place)
        place = parse_url(settings.database.url)
    except ShaleError as error:
        sys.exit(f"Error: {error}")
    if not isinstance(place, BucketUrl) or place.provider is not Provider.S3:
        sys.exit(f"Error: {settings.database.url} has no bucket that could be made here")
    try:
        was_made = _make(_client(settings.store), place.bucket, settings.store.region or REGION)
    except (BotoCoreError, ClientError) as error:
        where = settings.store.endpoint_url or "S3"
        sys.exit(f"Error: {where}: the bucket {place.bucket} cannot be made: {error}")
    sys.stderr.write(f"bucket {place.bucket}: {'made' if was_made else 'is there'}\n")


def _client(settings: StoreSettings) -> Any:
    return botocore.session.get_session().create_client(
        "s3",
        region_name=settings.region or REGION,
        endpoint_url=settings.endpoint_url or None,
        config=Config(
            connect_timeout=REQUEST_S,
            read_timeout=REQUEST_S,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path" if settings.path_style else "auto"},
        ),
    )


def _make(client: Any, bucket: str, region: str) -> bool:
    """Return whether it was made now. Waits for a server that is being started."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            return _made_now(client, bucket, region)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:  # noqa: PLR2004
                raise
            problem: Exception = error
        except HTTPClientError as error:
            problem = error
        if time.monotonic() > deadline:
            raise problem
        time.sleep(POLL_S)


def _made_now(client: Any, bucket: str, region: str) -> bool:
    where = {} if region == REGION else {"LocationConstraint": region}
    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:  # noqa: PLR2004
            raise
    else:
        return False
    try:
        client.create_bucket(
            Bucket=bucket, **({"CreateBucketConfiguration": where} if where else {})
        )
    except ClientError as error:
        if error.response["Error"]["Code"] != "BucketAlreadyOwnedByYou":
            raise
        return False  # another one of us was faster
    return True


if __name__ == "__main__":
    main()
