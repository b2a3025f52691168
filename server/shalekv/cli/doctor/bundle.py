"""The bundle of `shalekv doctor`: a file for bug reports, from which secrets are left out.

It has what is named here, and no more: findings, versions, settings, and what describes the state
of servers and of the manifest. No key and no value of the database is read for it. As a second line
of defence, what is known to be a secret, and what in a URL may be one, is masked in every file.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shalekv.cli.console.output import record_of
from shalekv.cli.doctor.diagnosis import Diagnosis, summary
from shalekv.cli.doctor.machine_facts import libraries_found
from shalekv.cli.doctor.server_facts import ServerExamination
from shalekv.protocol.manifest import Manifest, level_sizes
from shalekv_client import Stats, __version__

if TYPE_CHECKING:  # of shalekv[server]
    from shalekv.cli.console.settings_flags import Setting
    from shalekv.settings import AnyConfig

ZIP, TARS = ".zip", (".tar.gz", ".tgz")
MODE = 0o600
MASK = "***"
SECRET_CHARS_MIN = 6  # what is shorter is no secret, and would mask parts of words

_SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASSW|KEY|CREDENTIAL|AUTH|SAS|SIGNATURE|COOKIE|PRIVATE|CONNECTION_STRING",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s\"']*@")  # up to the last @
_QUERY_OF_URL = re.compile(r"(?<=://)([^?#\s\"']*)[?#][^\s\"']*")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+")


class Redaction:
    """Masks secrets in texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """`secrets` are masked wherever they occur, longest first."""
        known = {each.strip() for each in secrets}
        known |= {  # as they are written in JSON
            json.dumps(each, ensure_ascii=is_ascii)[1:-1]
            for each in known
            for is_ascii in (True, False)
        }
        self._secrets = sorted(
            (each for each in known if len(each) >= SECRET_CHARS_MIN), key=len, reverse=True
        )

    def clean(self, text: str) -> str:
        """Return the text with secrets, and what URLs may hide, masked."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        text = _USER_IN_URL.sub(f"{MASK}@", text)
        text = _QUERY_OF_URL.sub(rf"\1?{MASK}", text)
        return _BEARER.sub(rf"\1 {MASK}", text)


def known_secrets(
    environment: Mapping[str, str], config: AnyConfig | None, token_files: Sequence[Path]
) -> set[str]:
    """Return what must not be shown: of the environment, the settings, and files of tokens."""
    secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    secrets.update(str(value) for setting, value in _set(config) if setting.is_secret)
    for file in token_files:
        try:
            secrets.update(file.read_text(errors="replace").split())
        except OSError:
            continue
    return secrets


def settings_record(config: AnyConfig | None) -> Mapping[str, Any]:
    """Return the settings that are not the default; of secrets, only that they are set."""
    found = {}
    for setting, value in _set(config):
        if setting.field.is_required() or value != setting.field.default:
            found[setting.toml_key] = f"{MASK} (set)" if setting.is_secret else str(value)
    return found


def _set(config: AnyConfig | None) -> Iterator[tuple[Setting, Any]]:
    """All settings with their values; none without a configuration."""
    if config is None:
        return
    from shalekv.cli.console.settings_flags import settings_of  # noqa: PLC0415 (of shalekv[server])

    for setting in settings_of(type(config)):
        yield setting, getattr(getattr(config, setting.group), setting.name)


def manifest_record(manifest: Manifest) -> Mapping[str, Any]:
    """Return what describes a manifest, without a key of the database."""
    return {
        "manifest_id": manifest.manifest_id,
        "database_id": manifest.database_id.hex(),
        "cas_mode": manifest.cas_mode.name.lower(),
        "wal_mode": manifest.wal_mode.name.lower(),
        "wal_members": list(manifest.wal_members),
        "writer_epoch": manifest.writer_epoch,
        "compactor_epoch": manifest.compactor_epoch,
        "wal_id_last_compacted": manifest.wal_id_last_compacted,
        "wal_id_last_seen": manifest.wal_id_last_seen,
        "logical_time_ms": manifest.logical_time_ms,
        "gc_cutoff_ms": manifest.gc_cutoff_ms,
        "levels": [record_of(size) for size in level_sizes(manifest.leveled_ssts)],
        "snapshots": [
            {
                "id": each.id.hex(),
                "name": each.name,
                "manifest_id": each.manifest_id,
                "expire_time_s": each.snapshot_expire_time_s,
                "created_ms": each.created_ms,
            }
            for each in manifest.snapshots
        ],
        "leases": [
            {
                "id": each.id.hex(),
                "holder": each.holder,
                "expire_time_s": each.expire_time_s,
                "wal_id_min": each.wal_id_min,
            }
            for each in manifest.leases
        ],
        "origins": [
            {"url": each.url, "ssts": len(each.sst_ids) // 16} for each in manifest.origins
        ],
        "pending_loads": len(manifest.pending_loads),
        "recent_loads": len(manifest.recent_loads),
    }


def _stats_record(stats: Stats) -> Mapping[str, Any]:
    return {
        "endpoint": stats.endpoint,
        "records": stats.records,
        "processes": [
            {
                "role": process.role,
                "uptime_ms": process.uptime_ms,
                "requests": {kind.name.lower(): n for kind, n in process.requests.items()},
            }
            for process in stats.processes
        ],
    }


def bundle_files(
    diagnoses: Sequence[Diagnosis],
    config: AnyConfig | None,
    manifest: Manifest | None,
    servers: Sequence[ServerExamination],
    redaction: Redaction,
) -> Mapping[str, str]:
    """Return the files of a bundle by name, with secrets masked."""
    libraries = libraries_found()
    records: dict[str, Any] = {
        "versions.json": {
            "shalekv": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "distributions": dict(libraries.distributions),
            "libraries": dict(sorted(libraries.installed.items())),
        },
        "settings.json": settings_record(config),
    }
    if manifest is not None:
        records["manifest.json"] = manifest_record(manifest)
    for number, server in enumerate(servers):
        if server.status is not None:
            records[f"server-{number}-status.json"] = record_of(server.status)
        if server.stats is not None:
            records[f"server-{number}-stats.json"] = _stats_record(server.stats)
    texts = {name: json.dumps(record, indent=2) + "\n" for name, record in records.items()}
    lines = [json.dumps(record_of(each), ensure_ascii=False) for each in diagnoses]
    texts["findings.jsonl"] = "".join(f"{line}\n" for line in lines)
    texts["summary.txt"] = f"{summary(diagnoses)}\n"
    return {name: redaction.clean(text) for name, text in texts.items()}


def write_bundle(path: Path, files: Mapping[str, str]) -> None:
    """Write a new file that only its owner can read. Raises `FileExistsError`, `OSError`."""
    packed = _zipped(files) if path.name.endswith(ZIP) else _tarred(files)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, MODE)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, MODE)
        file.write(packed)


def _zipped(files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


def _tarred(files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), MODE
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
