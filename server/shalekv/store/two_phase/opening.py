"""Opens the records that the settings name. A driver is imported when it is wanted."""

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
    Recovered,
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
_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_WITH_TLS = {"tls": ["on"]}


def open_records(runtime: Runtime, settings: StoreSettings) -> RecordStore:
    """The records at `settings.records_url`. Nothing is connected yet.

    Raises `InvalidSetting`, which never quotes the URL: it may hold a password.
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
        connect_timeout_ms=settings.connect_timeout_ms,
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
    """Absolute: two processes in two folders would take two files for one, and see no conflict."""
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
    extras = "server" if extra == "server" else f"server,{extra}"
    return InvalidSetting(
        f"records at {scheme}:// need packages that are not installed: "
        f"pip install 'shalekv[{extras}]'"
    )


# --- belonging
# Whether records belong to a database: a wrong table would exclude nobody, and say nothing.
#
# The current manifest is never collected, so in a database that was created in two phases its
# record is there. Tables are made on demand, so that a misspelt name looks like a new one.


LOOKS_MAX = 3  # a manifest may be superseded and collected between the list and the record


class OwnedStore(TwoPhaseStore):
    """A two-phase store that makes sure of its records before it changes anything, once."""

    def __init__(self, plain: PlainStore, records: RecordStore, runtime: Runtime) -> None:
        super().__init__(plain, records, runtime)
        self._is_sure = False
        self._checking = asyncio.Lock()

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """As the interface says; raises `StoreRefused` when the records are another database's."""
        await self._make_sure()
        return await super().create(name, data, metadata)

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """As `create`."""
        await self._make_sure()
        return await super().recover(is_collected)

    async def _make_sure(self) -> None:
        if self._is_sure:
            return
        async with self._checking:
            if not self._is_sure:
                await check_belonging(self.plain, self.records)
                self._is_sure = True


async def check_belonging(plain: PlainStore, records: RecordStore) -> None:
    """Raise `StoreRefused` if there is a database, and `records` are not those of its creates."""
    newest = await _newest_manifest(plain)
    for _ in range(LOOKS_MAX):
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
