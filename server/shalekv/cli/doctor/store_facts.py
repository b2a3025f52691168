"""Asks an object store for what `shalekv.cli.doctor.store` judges."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shalekv.cli.doctor.diagnosis import STORE, Diagnosis
from shalekv.cli.doctor.machine_facts import nearest
from shalekv.cli.doctor.store import (
    CLOCK_STEP_MS,
    DatabaseFolder,
    judge_clock,
    judge_folder,
    judge_rules,
    judge_source,
    judge_trials,
)
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.url import BucketUrl, DatabaseUrl, FileUrl, Provider
from shalekv.store.verify.operations import try_all

# Variables by which obstore finds credentials; their values are secrets, or paths of them.
_VARIABLES: Mapping[Provider, str] = {Provider.GOOGLE: "GOOGLE_", Provider.AZURE: "AZURE_"}
_CONSOLES: Mapping[Provider, str] = {
    Provider.GOOGLE: "gcloud storage buckets describe gs://{bucket} --format="
    "'json(lifecycle_config,versioning_enabled,soft_delete_policy,retention_policy)'",
    Provider.AZURE: "az storage account blob-service-properties show --account-name "
    "$AZURE_STORAGE_ACCOUNT_NAME && az storage account management-policy show --account-name "
    "$AZURE_STORAGE_ACCOUNT_NAME",
}


class StoreExamination:
    """The checks of one store. Each method makes one check, and may be cancelled."""

    def __init__(
        self,
        place: DatabaseUrl,
        store: ObjectStore,
        runtime: Runtime,
        settings: StoreSettings,
        *,
        may_write: bool,
    ) -> None:
        """Without `may_write` nothing is written."""
        self._place = place
        self._store = store
        self._runtime = runtime
        self._settings = settings
        self._may_write = may_write
        self._where = place_flags(store.url, settings)

    async def credentials(self) -> list[Diagnosis]:
        """Return where the credentials come from. Raises `CredentialsFailed`."""
        match self._place:
            case BucketUrl(provider=provider) if self._settings.anonymous:
                return [STORE.ok("credentials", f"--anonymous: {provider}:// without any")]
            case BucketUrl(provider=Provider.S3) as place:
                from shalekv.store.aws_credentials import (  # noqa: PLC0415 (slow, and only for S3)
                    CredentialsFailed,
                    credentials_source,
                )

                try:
                    return [judge_source(await credentials_source(self._settings.aws_profile))]
                except CredentialsFailed as failed:
                    fix = (
                        "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...    # or --anonymous"
                    )
                    return [STORE.problem("credentials", failed.describe(place), fix)]
            case BucketUrl(provider=provider):
                prefix = _VARIABLES[provider]
                names = sorted(name for name in os.environ if name.startswith(prefix))
                source = ", ".join(names) or "the identity of the machine or of its user"
                return [STORE.ok("credentials", f"from {source}")]
            case _:
                return [STORE.ok("credentials", "none are needed")]

    async def operations(self) -> list[Diagnosis]:
        """Try lists, reads and, if it may, writes."""
        if self._is_missing():
            return []  # `rules` says so
        tried = try_all(self._store, self._runtime, may_write=self._may_write)
        trials = [trial async for trial in tried]
        return [*judge_trials(trials, where=self._where, is_written=self._may_write)]

    async def clock(self) -> list[Diagnosis]:
        """Compare the clocks."""
        if self._is_missing():
            return []
        if not self._may_write and not self.tells_time_to_readers:
            return [STORE.unchecked("clock", "left out by --read-only: it is asked by a write")]
        began_ms = _now_ms()
        store_ms = await self._store.now_ms()
        ended_ms = _now_ms()
        # The store's time was read between the two, and is cut to the step.
        is_file = isinstance(self._place, FileUrl)
        step_ms = 0 if is_file else CLOCK_STEP_MS
        offset_ms = (began_ms + ended_ms) // 2 - (store_ms + step_ms // 2)
        precision_ms = (ended_ms - began_ms) // 2 + step_ms // 2 + 1
        return [judge_clock(offset_ms, precision_ms=precision_ms)]

    @property
    def tells_time_to_readers(self) -> bool:
        """Return whether the store tells its time without a write."""
        return isinstance(self._place, BucketUrl) and self._place.provider is Provider.S3

    async def rules(self) -> list[Diagnosis]:
        """Read the rules of the bucket, or the kind of the file system."""
        match self._place:
            case BucketUrl(provider=Provider.S3) as place:
                from shalekv.store.s3.rules import read_rules  # noqa: PLC0415 (only for S3)

                found = await read_rules(place, self._runtime, self._settings)
                return [
                    *judge_rules(
                        found,
                        bucket=place.bucket,
                        folder=place.folder,
                        endpoint_url=self._settings.endpoint_url,
                    )
                ]
            case BucketUrl(provider=provider, bucket=bucket):
                reason = f"the driver of {provider}:// cannot read them"
                fix = _CONSOLES[provider].format(bucket=bucket)
                names = ("lifecycle", "versioning", "object lock")
                return [STORE.unchecked(name, reason, fix) for name in names]
            case FileUrl(path):
                found_folder = await self._runtime.workers.run(database_folder, path)
                return [*judge_folder(found_folder, where=self._where)]
            case _:
                return []

    def _is_missing(self) -> bool:
        """Return whether the store is a folder that does not exist: requests would create it."""
        return isinstance(self._place, FileUrl) and not self._place.path.is_dir()


def place_flags(url: str, settings: StoreSettings) -> str:
    """Return the flags that name a database, for commands to copy. They hold no secret."""
    flags = ["--url", url]
    for name in ("endpoint_url", "region"):
        if getattr(settings, name):
            flags += [f"--{name.replace('_', '-')}", getattr(settings, name)]
    flags += ["--path-style"] if settings.path_style else []
    flags += ["--anonymous"] if settings.anonymous else []
    return shlex.join(flags)


def database_folder(path: Path) -> DatabaseFolder:
    """Return what is known of a folder without writing."""
    there = nearest(path)
    return DatabaseFolder(
        str(path),
        exists=path.is_dir(),
        is_writable=os.access(there, os.W_OK | os.X_OK),
        file_system=file_system_of(there),
    )


def file_system_of(folder: Path) -> str:
    """Return the kind of the file system at a folder; empty: it is not known."""
    found, depth = "", -1
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
            _, mounted, kind, *_ = line.split()
            at = Path(mounted.encode().decode("unicode_escape"))
            if (at == folder or at in folder.resolve().parents) and len(at.parts) >= depth:
                found, depth = kind, len(at.parts)
    return found


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
