"""Opens a bucket of Google or a container of Azure, with the credentials of the environment.

obstore reads these itself when a client is created: GOOGLE_* and the files of `gcloud` for Google,
AZURE_* for Azure, or the identity of the machine. Settings override the environment.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shalekv.errors import InvalidSetting
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.retry import CONNECT_TIMEOUT_MS
from shalekv.store.url import BucketUrl, Provider

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import (
        AzureConfig,
        AzureStore,
        ClientConfig,
        GCSConfig,
        GCSCredential,
        GCSStore,
        RetryConfig,
    )

GOOGLE_PAGE_NAMES = 1_000
AZURE_PAGE_NAMES = 5_000
AZURE_BATCH_NAMES = 256  # Google has no batches
EXTRAS = {Provider.GOOGLE: "gcs", Provider.AZURE: "azure"}
VARIABLES = {
    Provider.GOOGLE: "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    Provider.AZURE: (
        "AZURE_STORAGE_ACCOUNT_NAME, which must be set, and AZURE_STORAGE_ACCOUNT_KEY or another "
        "credential"
    ),
}
NO_RETRIES: RetryConfig = {"max_retries": 0}  # retries are made above the store, and counted
NEVER = timedelta(days=365)  # the store has timeouts of its own, by the size of the transfer


def open_bucket(
    place: BucketUrl,
    runtime: Runtime,  # noqa: ARG001  (as for other stores: obstore has threads of its own)
    settings: StoreSettings,
) -> ObjectStore:
    """Open the store at `place` without sending a request. Raises `InvalidSetting`."""
    _check_endpoint(settings.endpoint_url)
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415  (an extra, see the next lines)
    except ImportError as error:
        raise InvalidSetting(
            f"{place}: {place.provider}:// needs obstore, which is not installed: "
            f"pip install 'shalekv[{EXTRAS[place.provider]}]'"
        ) from error
    from shalekv.store.obstore.store import (  # noqa: PLC0415 (an optional dependency)
        Bucket,
        ObstoreStore,
    )

    is_google = place.provider is Provider.GOOGLE
    try:
        client = _google(place, settings) if is_google else _azure(place, settings)
    except (BaseError, OSError, ValueError):
        # The error of obstore is not shown: it may quote part of a key that it could not read.
        raise InvalidSetting(
            f"{place}: the credentials cannot be used: "
            f"check {VARIABLES[place.provider]} in the environment"
        ) from None
    bucket = Bucket(
        client,
        settings,
        page_names=GOOGLE_PAGE_NAMES if is_google else AZURE_PAGE_NAMES,
        batch_names=1 if is_google else AZURE_BATCH_NAMES,
        proves=_has_generation if is_google else _has_azures_etag,
    )
    return ObstoreStore(place, bucket)


def _google(place: BucketUrl, settings: StoreSettings) -> GCSStore:
    from obstore.store import GCSStore  # noqa: PLC0415  (see above)

    config: GCSConfig = {}
    if settings.endpoint_url:
        config["base_url"] = settings.endpoint_url.rstrip("/")
    if settings.anonymous:
        config["skip_signature"] = True
    return GCSStore(
        place.bucket,
        config=config,
        client_options=_client_options(settings),
        retry_config=NO_RETRIES,
        # Writes request a token even if nothing is signed (object_store 0.14).
        credential_provider=_no_token if settings.anonymous else None,
    )


def _azure(place: BucketUrl, settings: StoreSettings) -> AzureStore:
    from obstore.store import AzureStore  # noqa: PLC0415  (see above)

    config: AzureConfig = {}
    if settings.endpoint_url:
        config["endpoint"] = settings.endpoint_url.rstrip("/")
    if settings.anonymous:
        config["skip_signature"] = True
    return AzureStore(
        place.bucket,
        config=config,
        client_options=_client_options(settings),
        retry_config=NO_RETRIES,
    )


def _client_options(settings: StoreSettings) -> ClientConfig:
    return {
        "allow_http": settings.endpoint_url.startswith("http://"),
        "connect_timeout": timedelta(milliseconds=CONNECT_TIMEOUT_MS),
        "pool_max_idle_per_host": str(settings.connections_max),
        "timeout": NEVER,
    }


def _has_generation(result: PutResult) -> bool:
    return bool(result["version"])


def _has_azures_etag(result: PutResult) -> bool:
    return (result["e_tag"] or "").strip('"').startswith("0x")


def _no_token() -> GCSCredential:
    return {"token": "", "expires_at": None}


def _check_endpoint(url: str) -> None:
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise InvalidSetting(
            "endpoint_url is not the address of a store: write https://HOST:PORT, or for Azure "
            "https://HOST:PORT/ACCOUNT where the account is no part of the host's name"
        )
    if parts.query or parts.fragment:
        raise InvalidSetting(
            "endpoint_url has a query or a fragment: put a shared access signature into "
            "AZURE_STORAGE_SAS_TOKEN"
        )
