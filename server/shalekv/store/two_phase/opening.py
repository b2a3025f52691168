"""Opens the records that the settings name, and checks that they belong to the database.

A driver is imported only when it is needed. Records in a wrong table would exclude no rival,
without any error, and since tables are created on demand, a misspelt name looks like a new table.
The check: the current manifest is never collected, so in a database that was created in two phases
its record exists.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from shalekv.errors import InvalidSetting, StoreRefused
from shalekv.format.names import MANIFEST_FOLDER, parse_manifest_name
from shalekv.protocol.two_phase import Destination
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    PlainStore,
    Repaired,
    nothing_is_collected,
)
from shalekv.store.two_phase.records import RecordStore
from shalekv.store.two_phase.store import TwoPhaseStore

EXAMPLES = (
    "dynamodb://TABLE, sqlite:///var/lib/shalekv-records.db (an absolute path), "
    "mysql://USER:PASSWORD@HOST/DATABASE or postgresql://USER:PASSWORD@HOST/DATABASE"
)
# The driver of SQLAlchemy, and the extra of this distribution that brings it.
DRIVERS = {
    "sqlite": ("sqlite+aiosqlite", "sqlite"),
    "mysql": ("mysql+asyncmy", "mysql"),
    "mariadb": ("mysql+asyncmy", "mysql"),
    "postgresql": ("postgresql+asyncpg", "postgres"),
    "postgres": ("postgresql+asyncpg", "postgres"),
}
CONNECTIONS_MAX = 8  # to a database; records are small, and servers allow few connections
RECHECKS_MAX = 3  # a manifest may be superseded and collected between the list and the record
_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_WITH_TLS = {"tls": ["on"]}


def open_records(runtime: Runtime, settings: StoreSettings) -> RecordStore:
    """Open the records at `settings.records_url`, without connecting yet.

    Raises `InvalidSetting`, whose text never has the URL, which may hold a password.
    """
    if not settings.records_url:
        raise InvalidSetting(
            f"--cas two_phase needs a transactional store: set records_url to {EXAMPLES}"
        )
    try:
        parts = urlsplit(settings.records_url)
        port = parts.port
    except ValueError:
        raise InvalidSetting(
            "records_url cannot be read: in a user or a password, write % and the code of a "
            f"character that means something in a URL, such as %40 for @ and %2F for /: {EXAMPLES}"
        ) from None
    if parts.scheme == "dynamodb":
        return _dynamodb(parts, runtime, settings)
    if parts.scheme not in DRIVERS:
        raise InvalidSetting(f"records_url names no transactional store: write {EXAMPLES}")
    return _sql(parts, port, settings)


def _dynamodb(parts: SplitResult, runtime: Runtime, settings: StoreSettings) -> RecordStore:
    rest = parts.path.strip("/") or parts.query or parts.fragment
    if rest or not _TABLE.fullmatch(parts.netloc):
        raise InvalidSetting(
            "records_url names no table: write dynamodb:// and 3 to 255 letters, digits, dots, "
            "dashes and underscores"
        )
    try:
        from shalekv.store.two_phase.dynamodb import DynamoRecords  # noqa: PLC0415  (see above)
    except ImportError as error:
        raise _missing("dynamodb", "server") from error
    return DynamoRecords(parts.netloc, runtime, settings)


def _sql(parts: SplitResult, port: int | None, settings: StoreSettings) -> RecordStore:
    driver, extra = DRIVERS[parts.scheme]
    try:
        from shalekv.store.two_phase.sql import (  # noqa: PLC0415
            Limits,
            SqlPlace,
            SqlRecords,
        )
    except ImportError as error:
        raise _missing(parts.scheme, extra) from error
    limits = Limits(
        connections_max=min(CONNECTIONS_MAX, settings.connections_max),
        request_timeout_ms=settings.request_timeout_ms,
    )
    if parts.scheme == "sqlite":
        place = SqlPlace(driver, path=_sqlite_path(parts))
    else:
        database = unquote(parts.path.strip("/"))
        query = parse_qs(parts.query, keep_blank_values=True)
        if not parts.hostname or not database or "/" in database or parts.fragment:
            raise InvalidSetting(f"records_url names no host or no database: write {EXAMPLES}")
        if query not in ({}, _WITH_TLS):
            raise InvalidSetting("records_url takes no options but ?tls=on")
        place = SqlPlace(
            driver,
            host=parts.hostname,
            port=port,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=database,
            is_encrypted=bool(query),
        )
    try:
        return SqlRecords(place, limits)
    except ImportError as error:
        raise _missing(parts.scheme, extra) from error


def _sqlite_path(parts: SplitResult) -> Path:
    """Return the path of an SQLite URL, which must be absolute.

    With a relative path, processes in two working directories would use two files, and see no
    conflict.
    """
    names = [name for name in unquote(parts.path).split("/") if name]
    wrong = parts.netloc or parts.query or parts.fragment or parts.path.endswith("/")
    if wrong or not names or {".", ".."} & {*names} or "\0" in parts.path:
        raise InvalidSetting(
            "records_url names no file: write sqlite:// and its absolute path, as in "
            "sqlite:///var/lib/shalekv-records.db"
        )
    path = Path("/", *names)
    if not path.parent.is_dir():
        raise InvalidSetting(f"records_url names a file in {path.parent}, which is no folder")
    return path


def _missing(scheme: str, extra: str) -> InvalidSetting:
    return InvalidSetting(
        f"records at {scheme}:// need packages that are not installed: "
        f"pip install 'shalekv[{extra}]'"
    )


class CheckedTwoPhaseStore(TwoPhaseStore):
    """A two-phase store that checks before its first change that the records are its own."""

    def __init__(self, plain: PlainStore, records: RecordStore, runtime: Runtime) -> None:
        super().__init__(plain, records, runtime)
        self._is_checked = False
        self._check_lock = asyncio.Lock()

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """Create as `ObjectStore.create`; raise `StoreRefused` if the records are not its own."""
        await self._check_once()
        return await super().create(name, data, metadata)

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:
        """Repair as `ObjectStore.repair`; raise `StoreRefused` as `create` does."""
        await self._check_once()
        return await super().repair(is_collected)

    async def _check_once(self) -> None:
        if self._is_checked:
            return
        async with self._check_lock:
            if not self._is_checked:
                await check_ownership(self.plain, self.records)
                self._is_checked = True


async def check_ownership(plain: PlainStore, records: RecordStore) -> None:
    """Raise `StoreRefused` if there is a database, and `records` lack its newest manifest."""
    newest = await _newest_manifest(plain)
    for _ in range(RECHECKS_MAX):
        if newest is None or await records.find(Destination(plain.url, newest)) is not None:
            return
        seen, newest = newest, await _newest_manifest(plain)
        if newest == seen:
            break
    if newest is None:
        return
    raise StoreRefused(
        plain.url,
        "create",
        newest,
        f"the transactional store at {records.url} has no record of it. Either records_url, its "
        "region or its endpoint is another one than this database was created with, or it was "
        "created with --cas native",
    )


async def _newest_manifest(plain: PlainStore) -> str | None:
    newest: str | None = None
    async for info in plain.list(MANIFEST_FOLDER):
        if parse_manifest_name(info.name) is not None:
            newest = info.name
    return newest
