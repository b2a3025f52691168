"""Runs all checks: areas beside each other, each check with a deadline, and none ends others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from shalekv.cli.console.bucket import opened_store
from shalekv.cli.console.connection import Target
from shalekv.cli.doctor.database import DATABASE
from shalekv.cli.doctor.database_facts import DatabaseExamination
from shalekv.cli.doctor.diagnosis import Area, Diagnosis, Severity
from shalekv.cli.doctor.machine import SettingsFound, judge_machine
from shalekv.cli.doctor.machine_facts import machine_facts
from shalekv.cli.doctor.server_facts import ServerExamination
from shalekv.cli.doctor.store import STORE
from shalekv.cli.doctor.store_facts import StoreExamination, place_flags
from shalekv.errors import InvalidSetting, ShaleError
from shalekv.protocol.manifest import Manifest
from shalekv.runtime import ThreadWorkers
from shalekv.settings import AnyConfig
from shalekv.store.url import parse_url
from shalekv_client import ShaleKVError

MACHINE = Area("machine")

Work = Callable[[], Awaitable[Sequence[Diagnosis]]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined, and how."""

    url: str | None  # None: no database
    target: Target | None  # None: no servers
    config: AnyConfig | None  # None: the settings are wrong
    settings: SettingsFound
    may_write: bool
    timeout_ms: int  # of each check


@dataclass(slots=True)
class Findings:
    """The findings so far, and what a bundle says beside them."""

    diagnoses: list[Diagnosis] = field(default_factory=list)
    servers: list[ServerExamination] = field(default_factory=list)
    manifest: Manifest | None = None


async def examine(subject: Subject) -> Findings:
    """Make all checks; return the findings in the order of the areas."""
    found = Findings()
    target = subject.target
    if target is not None:
        found.servers = [ServerExamination(address, target) for address in target.addresses]
    workers = ThreadWorkers(1)  # a disk that does not answer must not keep the process
    try:
        async with asyncio.TaskGroup() as tasks:
            machine = tasks.create_task(_machine(subject, workers))
            stored = tasks.create_task(_stored(subject, found))
            asked = [tasks.create_task(_server(subject, each)) for each in found.servers]
    finally:
        workers.close()
    found.diagnoses = [*machine.result(), *stored.result()]
    for server, task in zip(found.servers, asked, strict=True):
        found.diagnoses += task.result()
        if found.manifest is not None and subject.url is not None:
            found.diagnoses += server.same_database(found.manifest.database_id, subject.url)
    return found


async def checked(
    area: Area, check: str, work: Work, timeout_ms: int, *, if_silent: str = ""
) -> list[Diagnosis]:
    """Return the findings of a check, or why there are none.

    With `if_silent`, that there is no answer in time is a problem, and this is what to do.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1_000):
            return [*await work()]
    except TimeoutError:
        silence = f"no answer within {timeout_ms:,} ms (--timeout-ms)"
        if if_silent:
            return [area.problem(check, silence, if_silent)]
        return [area.unchecked(check, silence)]
    except (ShaleError, ShaleKVError) as error:
        return [area.unchecked(check, str(error))]
    except OSError as error:
        return [area.unchecked(check, error.strerror or "the system refuses")]
    except Exception as error:  # noqa: BLE001 - the other checks go on, and its text may be a secret
        return [area.unchecked(check, f"the check itself failed: {type(error).__name__}")]


async def _machine(subject: Subject, workers: ThreadWorkers) -> list[Diagnosis]:
    async def gather() -> list[Diagnosis]:
        facts = await workers.run(machine_facts, subject.url, subject.config, subject.settings)
        return judge_machine(facts)

    return await checked(MACHINE, "machine", gather, subject.timeout_ms)


async def _stored(subject: Subject, found: Findings) -> list[Diagnosis]:
    if subject.url is None:
        return [STORE.unchecked("store", "no --url was given")]
    if subject.config is None:
        return [STORE.unchecked("store", "the settings are wrong: see above")]
    settings, timeout_ms = subject.config.store, subject.timeout_ms
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(opened_store(subject.url, settings))
        except InvalidSetting as error:
            return [STORE.problem("store", str(error))]
        plain, cas = opened
        place = parse_url(subject.url)
        examination = StoreExamination(
            place, plain, cas.runtime, settings, may_write=subject.may_write
        )
        diagnoses = await checked(STORE, "credentials", examination.credentials, timeout_ms)
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
            subject.config,
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


async def _server(subject: Subject, server: ServerExamination) -> list[Diagnosis]:
    return [
        *await checked(server.area, "certificates", server.certificates, subject.timeout_ms),
        *await checked(
            server.area,
            "reachable",
            server.answers,
            subject.timeout_ms,
            if_silent=f"shalekv health --addr {server.address}    # its log may say why",
        ),
    ]
