"""Runs the checks of a store and of the database in it: they need what a server needs."""

from __future__ import annotations

from contextlib import AsyncExitStack

from shalekv.cli.console.bucket import opened_store
from shalekv.cli.doctor.database import DATABASE
from shalekv.cli.doctor.database_facts import DatabaseExamination
from shalekv.cli.doctor.diagnosis import STORE, Diagnosis, Severity, Work, checked
from shalekv.cli.doctor.store_facts import StoreExamination, place_flags
from shalekv.cli.process.logs import configure_logs
from shalekv.errors import InvalidSetting
from shalekv.protocol.manifest import Manifest
from shalekv.settings import AnyConfig, LogFormat, LogLevel
from shalekv.store.url import parse_url


async def examined_store(
    url: str, config: AnyConfig, *, may_write: bool, timeout_ms: int
) -> tuple[list[Diagnosis], Manifest | None]:
    """Return the findings about the store and the database at a URL, and the manifest if any.

    `timeout_ms` is the time of each check.
    """
    configure_logs(LogFormat.CONSOLE, LogLevel.ERROR)
    settings = config.store
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(opened_store(url, settings))
        except InvalidSetting as error:
            return [STORE.problem("store", str(error))], None
        plain, cas = opened
        place = parse_url(url)
        examination = StoreExamination(place, plain, cas.runtime, settings, may_write=may_write)
        diagnoses = await checked(STORE, "credentials", examination.credentials, timeout_ms)
        if any(each.severity is Severity.PROBLEM for each in diagnoses):
            dependent = (STORE, "permissions"), (STORE, "rules"), (DATABASE, "database")
            return [
                *diagnoses,
                *(area.unchecked(check, "no credentials: see above") for area, check in dependent),
            ], None
        where = place_flags(plain.url, settings)
        tried = await checked(
            STORE,
            "permissions",
            examination.operations,
            timeout_ms,
            if_silent=f"shalekv store verify {where}    # the network, or a wrong --endpoint-url?",
        )
        diagnoses += tried
        if any(each.check in ("list", "permissions") and _is_bad(each) for each in tried):
            return [
                *diagnoses,
                DATABASE.unchecked("database", "the store cannot be read: see above"),
            ], None
        diagnoses += await checked(STORE, "clock", examination.clock, timeout_ms)
        diagnoses += await checked(STORE, "rules", examination.rules, timeout_ms)
        may_ask_time = may_write or examination.tells_time_to_readers
        database = DatabaseExamination(
            plain,
            cas,
            config,
            where=where,
            may_ask_time=may_ask_time,
        )
        diagnoses += await _database(database, timeout_ms)
        return diagnoses, database.facts.manifest if database.facts else None


def _is_bad(diagnosis: Diagnosis) -> bool:
    return diagnosis.severity in (Severity.PROBLEM, Severity.UNCHECKED)


async def _database(database: DatabaseExamination, timeout_ms: int) -> list[Diagnosis]:
    diagnoses = await checked(DATABASE, "manifest", database.manifest, timeout_ms)
    facts = database.facts
    if facts is None:
        return diagnoses
    checks: dict[str, Work] = {
        "writer": lambda: database.writer(facts),
        "wal": lambda: database.work(facts),
        "pins": lambda: database.pins(facts),
        "garbage": lambda: database.garbage(facts),
        "safekeepers": lambda: database.safekeepers(facts),
        "records": lambda: database.records(facts),
    }
    for name, work in checks.items():
        diagnoses += await checked(DATABASE, name, work, timeout_ms)
    return diagnoses
