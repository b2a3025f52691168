"""Runs all checks: areas beside each other, each check with a deadline, and none ends others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shalekv.cli.console.connection import Target
from shalekv.cli.doctor.diagnosis import NEEDS_SERVER, STORE, Diagnosis, checked
from shalekv.cli.doctor.machine import MACHINE, SettingsFound, judge_machine
from shalekv.cli.doctor.machine_facts import machine_facts
from shalekv.cli.doctor.server_facts import ServerExamination
from shalekv.protocol.manifest import Manifest
from shalekv.runtime import ThreadWorkers

if TYPE_CHECKING:  # of shalekv[server]
    from shalekv.settings import AnyConfig


@dataclass(frozen=True, slots=True)
class Subject:
    """Subjects of an examination, and how they are reached."""

    url: str | None  # None: no database
    target: Target | None  # None: no servers
    config: AnyConfig | None  # None: the settings are wrong, or there is no code to read them
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


async def _machine(subject: Subject, workers: ThreadWorkers) -> list[Diagnosis]:
    async def gather() -> list[Diagnosis]:
        facts = await workers.run(machine_facts, subject.url, subject.config, subject.settings)
        return judge_machine(facts)

    return await checked(MACHINE, "machine", gather, subject.timeout_ms)


async def _stored(subject: Subject, found: Findings) -> list[Diagnosis]:
    if subject.url is None:
        return [STORE.unchecked("store", "no --url was given")]
    try:
        from shalekv.cli.doctor.stored import examined_store  # noqa: PLC0415 (of shalekv[server])
    except ModuleNotFoundError:
        return [STORE.unchecked("store", NEEDS_SERVER)]
    if subject.config is None:
        return [STORE.unchecked("store", "the settings are wrong: see above")]
    diagnoses, found.manifest = await examined_store(
        subject.url, subject.config, may_write=subject.may_write, timeout_ms=subject.timeout_ms
    )
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
