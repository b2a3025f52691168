"""Connections to SQL databases on which what was answered is durable, and seen by all.

Every statement is a transaction of its own: its condition and its change are one step, and no
snapshot lives on that an older read began.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

SQLITE_BUSY_MS = 10_000
RECYCLE_S = 1_800  # before firewalls and servers drop what is idle


@dataclass(frozen=True, slots=True)
class SqlPlace:
    """Where a database is. `driver` is a name of SQLAlchemy's."""

    driver: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    database: str = ""
    path: Path | None = None  # of SQLite
    is_encrypted: bool = False

    @property
    def shown(self) -> str:
        """The URL without user and password."""
        scheme = self.driver.partition("+")[0]
        if self.path is not None:
            return f"{scheme}://{self.path}"
        port = "" if self.port is None else f":{self.port}"
        return f"{scheme}://{self.host}{port}/{self.database}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the connections to a database."""

    connections_max: int
    connect_timeout_ms: int
    request_timeout_ms: int


def open_engine(place: SqlPlace, limits: Limits) -> AsyncEngine:
    """Raises `ImportError` when the driver is not installed. Nothing is connected yet."""
    engine = create_async_engine(
        _url(place),
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
        # One writer at a time is all that SQLite has: others would poll for their turn.
        pool_size=limits.connections_max if place.path is None else 1,
        max_overflow=0,
        pool_timeout=limits.request_timeout_ms / 1_000,
        pool_pre_ping=True,
        pool_recycle=RECYCLE_S,
        connect_args=_connect_args(place, limits),
    )
    if place.path is not None:
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _url(place: SqlPlace) -> URL:
    if place.path is not None:
        return URL.create(place.driver, database=str(place.path))
    return URL.create(
        place.driver,
        username=place.user or None,
        password=place.password or None,
        host=place.host,
        port=place.port,
        database=place.database,
    )


def _connect_args(place: SqlPlace, limits: Limits) -> dict[str, Any]:
    timeout_s = limits.connect_timeout_ms / 1_000
    encryption = {"ssl": ssl.create_default_context()} if place.is_encrypted else {}
    match place.driver.partition("+")[0]:
        case "postgresql":
            # The server may have been told to answer before a commit is on its disk.
            durable = {"server_settings": {"synchronous_commit": "on"}}
            return {"timeout": timeout_s, **durable, **encryption}
        case "mysql":
            return {"connect_timeout": max(1, round(timeout_s)), **encryption}
        case _:
            return {}


def _prepare_sqlite(connection: Any, _entry: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_MS}")
        # With the rollback journal, FULL does not sync the folder after a commit: EXTRA does.
        cursor.execute("PRAGMA synchronous = EXTRA")
    finally:
        cursor.close()
