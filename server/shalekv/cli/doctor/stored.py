"""Runs the checks of a store and of the database in it: they need what a server needs."""

from __future__ import annotations

from contextlib import AsyncExitStack

from shalekv.cli.console.bucket import opened_store
from shalekv.cli.doctor.database import DATABASE
from shalekv.cli.doctor.database_facts import DatabaseExamination
from shalekv.cli.doctor.diagnosis import Diagnosis, Severity
from shalekv.cli.doctor.examination import Findings, Subject, Work, checked
from shalekv.cli.doctor.store import STORE
from shalekv.cli.doctor.store_facts import StoreExamination, place_flags
from shalekv.cli.process.logs import configure_logs
from shalekv.errors import InvalidSetting
from shalekv.settings import AnyConfig, LogFormat, LogLevel
from shalekv.store.url import parse_url


async def examined_store(
    subject: Subject, url: str, config: AnyConfig, found: Findings
) -> list[Diagnosis]:
    """Return the findings about the store and the database at a URL; keep the manifest."""
    configure_logs(LogFormat.CONSOLE, LogLevel.ERROR)
    settings, timeout_ms = config.store, subject.timeout_ms
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(opened_store(url, settings))
        except InvalidSetting as error:
            return [STORE.problem("store", str(error))]
        plain, cas = opened
        place = parse_url(url)
        examination = StoreExamination(
            place, plain, cas.runtime, settings, may_write=subject.may_write
        )
        diagnoses = await checked(STORE, "credentials", examination.credentials, timeout_ms)
        if any(each.severity is Severity.PROBLEM for each in diagnoses):
            dependent = (STORE, "permissions"), (STORE, "rules"), (DATABASE, "database")
            return [
                *diagnoses,
                *(area.unchecked(check, "no credentials: see above") for area, check in dependent),
            ]
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
            ]
        diagnoses += await checked(STORE, "clock", examination.clock, timeout_ms)
        diagnoses += await checked(STORE, "rules", examination.rules, timeout_ms)
        may_ask_time = subject.may_write or examination.tells_time_to_readers
        database = DatabaseExamination(
            plain,
            cas,
            config,
            where=where,
            may_ask_time=may_ask_time,
        )
        diagnoses += await _database(database, timeout_ms)
        found.manifest = database.facts.manifest if database.facts else None
        return diagnoses


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
