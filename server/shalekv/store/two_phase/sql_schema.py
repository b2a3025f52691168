"""Makes the table of records where there is none, and looks whether the server forgets commits."""

from __future__ import annotations

import structlog
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateTable

from shalekv.store.two_phase.sql_table import RECORDS

log = structlog.get_logger()

# Settings of servers, and what they must be for a commit to survive a power cut.
DURABLE = {
    "mysql": ("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit", "1"),
    "postgresql": ("SHOW fsync", "on"),
}


async def prepare(connection: AsyncConnection, url: str) -> None:
    """See to it that the table is there; raises what SQLAlchemy does.

    Who may not create tables can use one that an administrator has made.
    """
    if not await _has_table(connection):
        try:
            await connection.execute(CreateTable(RECORDS, if_not_exists=True))
        except DBAPIError:
            # Two that create it at once: PostgreSQL tells one of them of a duplicate.
            if not await _has_table(connection):
                raise
    await _warn_unless_durable(connection, url)


async def _has_table(connection: AsyncConnection) -> bool:
    # Not by reading the catalogue: whoever may not read the table must hear so.
    try:
        await connection.execute(select(RECORDS).limit(1))
    except DBAPIError as error:
        if error.connection_invalidated or not _is_absence(error):
            raise
        return False
    return True


def _is_absence(error: DBAPIError) -> bool:
    said = str(error.orig).lower()
    return "no such table" in said or "doesn't exist" in said or "does not exist" in said


async def _warn_unless_durable(connection: AsyncConnection, url: str) -> None:
    name = {"mariadb": "mysql"}.get(connection.dialect.name, connection.dialect.name)
    if name not in DURABLE:
        return
    query, wanted = DURABLE[name]
    found = str((await connection.execute(text(query))).scalar_one())
    if found != wanted:
        log.warning(
            "this server may forget records in a power cut, and a rival would overwrite objects",
            records=url,
            setting=query,
            found=found,
            wanted=wanted,
        )
