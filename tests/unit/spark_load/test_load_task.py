"""Tasks of a load on a folder (repeated, late, or with wrong clocks), the reports that a
driver collects, and the commit by the right writer.
"""

from __future__ import annotations

import asyncio
import re
import threading
from asyncio import Task
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from structlog.testing import capture_logs
from structlog.typing import EventDict

from shalekv.errors import (
    DatabaseNotFound,
    DeadlinePassed,
    IllegalState,
    InvalidRequest,
    InvalidSetting,
    LeaseLost,
    OutcomeUnknown,
    PolicyUnknown,
    QueueFull,
    ShaleError,
    Stopping,
)
from shalekv.format.names import level_name
from shalekv.jobs.bulk_load import LoadJob
from shalekv.jobs.collect import CollectJob
from shalekv.protocol.lease import without_lease
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import CollectorSettings, LimitSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv_client import Client, ErrorDetails, Overloaded, TlsOptions
from shalekv_client.admin import Ingested
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.loading.load import renewed
from shalekv_spark.loading.options import OPEN, Committed, Committer, collect_reports
from shalekv_spark.place import Place
from tests.kit.certificates import LOCAL, Authority
from tests.kit.constants import constants
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.guarded import TokenBook
from tests.kit.processes.processes import Processes
from tests.kit.serving.dict_server import DictServer, refusing, silent
from tests.kit.timeouts import until
from tests.unit.spark_load.loads import LEVELS, LOAD_ID, Row, begun, current, database, files, write

ROWS = [Row(b"%06d" % number, b"%06d" % number * 20) for number in range(2_000)]
HALVES = (ROWS[:1_000], ROWS[1_000:])
NOTHING_IS_SPARED = CollectorSettings(collect_age_s=0, foreign_file_age_s=0, wal_retention_s=0)


def names(infos: Sequence[SstInfo]) -> set[str]:
    return {level_name(info.id) for info in infos}


async def collected(store: CasStore) -> set[str]:
    """Return the files that are left when a collector has deleted all it may."""
    begun_ms = await store.now_ms()
    while await store.now_ms() <= begun_ms:  # a file that is as new as its list is too new for it
        pass
    await CollectJob(store, NOTHING_IS_SPARED).collect()
    return await files(store)


async def commit(store: CasStore, infos: Sequence[SstInfo]) -> Committed:
    return await Committer(store, OPEN, timeout_s=10).commit(LOAD_ID, infos)


async def test_of_two_attempts_of_one_task_one_counts(tmp_path: Path) -> None:
    """One of two attempts of a task is committed; the files of the other are collected, but
    protected while the load runs.
    """
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        first = await asyncio.to_thread(write, place, job.ticket, HALVES[0])
        again = await asyncio.to_thread(write, place, job.ticket, HALVES[0], attempt=1)
        other = await asyncio.to_thread(write, place, job.ticket, HALVES[1], partition=1, attempt=2)
        written = collect_reports([*again, *other])
        assert written.rows == len(ROWS)
        assert len(written.infos) >= 4
        assert len(await collected(store)) == len(written.infos) + len(first) - 1
        with pytest.raises(IllegalState, match="partition 0 is reported by two attempts"):
            collect_reports([*first, *again, *other])
        assert not (await commit(store, written.infos)).already_applied
        await job.end()
        assert await collected(store) == names(written.infos)
        assert (await begun(store)).committed_seq is not None


async def test_a_late_task_publishes_nothing(tmp_path: Path) -> None:
    """Files of a task that ends after the driver has given up, or another run has
    committed, are collected.
    """
    async with database(tmp_path) as (place, store):
        given_up = await begun(store)
        await asyncio.to_thread(write, place, given_up.ticket, HALVES[0])
        await given_up.end()
        await asyncio.to_thread(write, place, given_up.ticket, HALVES[1])
        assert await collected(store) == set()
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, ROWS)
        written = collect_reports(report)
        await commit(store, written.infos)
        await job.end()
        for ticket in (given_up.ticket, job.ticket):
            await asyncio.to_thread(write, place, ticket, HALVES[1])
        assert await collected(store) == names(written.infos)
        (load,) = (await current(store)).pending_loads
        assert [*load.ssts] == written.infos
        again = await commit(store, collect_reports(report).infos)
        assert again.already_applied


async def test_refused_rows_are_reported_and_not_raised(tmp_path: Path) -> None:
    """Refused rows are reported, not raised, since Spark would try again; the task takes
    all its batches.
    """
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, [Row(b"b"), Row(b"a")])
        assert [each["file"] for each in report] == [None]
        message = "rows: partition 0, row 1: the partition is not sorted: key b'a' comes after b'b'"
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            collect_reports(report)


async def test_partitions_that_overlap_are_refused(tmp_path: Path) -> None:
    """Partitions that overlap, even by one key, are refused; others may come in any order."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        parts = [ROWS[:10], ROWS[10:20], ROWS[19:30]]
        reports = [
            await asyncio.to_thread(write, place, job.ticket, rows, partition=at, attempt=at)
            for at, rows in enumerate(parts)
        ]
        swapped = collect_reports([*reports[1], *reports[0]])
        assert [info.first_key for info in swapped.infos] == [b"000000", b"000010"]
        with pytest.raises(InvalidRequest, match="partitions 1 and 2 are not sorted: both hold"):
            collect_reports([*reports[0], *reports[2], *reports[1]])


async def test_a_report_that_lacks_a_row_is_not_committed(tmp_path: Path) -> None:
    """A report without a file, or without the end of a task, is not committed."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, ROWS)
        assert len(report) >= 4
        for at in range(len(report)):
            with pytest.raises(IllegalState, match="do not report all that they wrote"):
                collect_reports([*report[:at], *report[at + 1 :]])


DEADLINE_S = 30
LEASE_TTL_S = 10  # the least that there is


class Session:
    """The part of a session of Spark that a load uses while it works."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.interrupted = threading.Event()

    def addTag(self, tag: str) -> None:  # noqa: N802 - Spark's names
        self.tags.append(tag)

    def removeTag(self, tag: str) -> None:  # noqa: N802
        self.tags.remove(tag)

    def interruptTag(self, tag: str) -> None:  # noqa: N802
        if tag in self.tags:
            self.interrupted.set()


async def drop_leases(store: CasStore) -> None:
    def edit(manifest: Manifest) -> Manifest:
        for lease in manifest.leases:
            manifest = without_lease(manifest, lease.id)
        return manifest

    stored = StoredManifest(store)
    await stored.refresh()
    await stored.edit(edit, lambda manifest: not manifest.leases)


def work(place: Place, session: Session, *, is_lost: bool) -> None:
    """Run a load whose tasks go on until the lease was renewed, or the job is interrupted."""
    with StoreLoop(place) as loop:
        job = loop.run(
            LoadJob.begin(
                loop.store, LOAD_ID, levels=LEVELS, limits=LimitSettings(), ttl_s=LEASE_TTL_S
            )
        )
        manifest_id = loop.run(current(loop.store)).manifest_id
        with renewed(loop, job, cast("Any", session)) as check:
            check()
            if is_lost:
                loop.run(drop_leases(loop.store))
                assert session.interrupted.wait(DEADLINE_S)
            else:
                while loop.run(current(loop.store)).manifest_id == manifest_id:
                    session.interrupted.wait(0.1)
            check()


async def test_the_lease_is_renewed_while_spark_works(tmp_path: Path) -> None:
    """The lease is renewed while Spark works, without an interruption, and no tag is left."""
    async with database(tmp_path) as (place, store):
        session = Session()
        await asyncio.to_thread(work, place, session, is_lost=False)
        assert not session.interrupted.is_set()
        assert not session.tags
        (lease,) = (await current(store)).leases
        assert lease.holder == f"load {LOAD_ID}"


async def test_a_job_whose_lease_is_lost_is_ended(tmp_path: Path) -> None:
    """A job whose lease is lost is ended, since its files may be deleted."""
    async with database(tmp_path) as (place, _):
        session = Session()
        with pytest.raises(LeaseLost):
            await asyncio.to_thread(work, place, session, is_lost=True)
        assert session.interrupted.is_set()
        assert not session.tags


TIMEOUT_S = 60.0
OPTIONS = "shalekv_spark.loading.options"
FEW = [Row(b"a", b"1"), Row(b"b", b"2")]


@dataclass(frozen=True, slots=True)
class Ready:
    """A served database, and the files of a load that only has to be committed."""

    server: Child
    store: CasStore
    infos: list[SstInfo]

    def committer(self, writer: str | None, timeout_s: float = TIMEOUT_S) -> Committer:
        return Committer(self.store, writer, timeout_s=timeout_s)


@asynccontextmanager
async def ready(folder: Path, processes: Processes, *flags: str) -> AsyncIterator[Ready]:
    place = Place(f"file://{folder}/database")
    server = await processes.serve(place.url, *ALONE, *flags)
    async with place.open() as store:
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, FEW)
        yield Ready(server, store, [*collect_reports(report).infos])


async def test_a_writer_that_does_not_answer_is_not_fenced(
    tmp_path: Path, processes: Processes
) -> None:
    """When the writer does not answer, the errors before the load and at its commit say
    what to pass instead, and with that the load is committed.
    """
    async with ready(tmp_path, processes) as load:
        await load.server.kill()
        with pytest.raises(InvalidSetting, match=r"no server answers .* pass writer='open'"):
            await load.committer(None).check()
        with pytest.raises(OutcomeUnknown, match="run the load again with the same load_id, which"):
            await load.committer(None, 0.2).commit(LOAD_ID, load.infos)
        assert (await current(load.store)).writer_epoch == 1
        committer = load.committer(OPEN)
        await committer.check()
        assert not (await committer.commit(LOAD_ID, load.infos)).already_applied
        assert (await current(load.store)).writer_epoch == 2


async def test_the_writer_of_another_database_is_refused(
    tmp_path: Path, processes: Processes
) -> None:
    """A writer of another database is refused before anything is written."""
    other = await processes.serve(f"file://{tmp_path}/other", *ALONE)
    async with ready(tmp_path, processes) as load:
        with pytest.raises(InvalidSetting, match="serves database"):
            await load.committer(other.listen).check()


async def test_a_writer_that_asks_who_calls_is_shown_the_token(
    tmp_path: Path, processes: Processes
) -> None:
    """By TLS; without the token, the load is refused before anything is written."""
    authority, tokens = Authority(), TokenBook(tmp_path, "root")
    files = authority.issue(*LOCAL).write(tmp_path, "server")
    ((_, shown),) = tokens.shown("root")
    (tmp_path / "token").write_text(shown.removeprefix("Bearer "))
    tls = TlsOptions(ca=authority.write(tmp_path))
    listening = ("--tls-cert", files.certificate, "--tls-key", files.key)
    asking = ("--tokens-file", str(tokens.path), "--admins", "token:root")
    async with ready(tmp_path, processes, *listening, *asking) as load:
        with pytest.raises(InvalidSetting, match="writer: "):
            await Committer(load.store, None, timeout_s=TIMEOUT_S, tls=tls).check()
        none = f"{tmp_path}/none"
        with pytest.raises(InvalidSetting, match="token_file: "):
            await Committer(load.store, None, timeout_s=TIMEOUT_S, token_file=none).check()
        file = f"{tmp_path}/token"
        committer = Committer(load.store, None, timeout_s=TIMEOUT_S, tls=tls, token_file=file)
        await committer.check()
        assert not (await committer.commit(LOAD_ID, load.infos)).already_applied


def is_repeated(committing: Task[Committed], logs: Sequence[EventDict], error: str) -> bool:
    """Return whether a commit is repeated because of such an error, or is over."""
    return committing.done() or any(error in str(each.get("error")) for each in logs)


async def end_unknown(committing: Task[Committed], pause: str, cause: type[ShaleError]) -> None:
    """Let the next attempt of a commit, after this `pause`, be the last; it leaves the outcome
    unknown.
    """
    with (
        constants({f"{OPTIONS}:{pause}": TIMEOUT_S}),
        pytest.raises(OutcomeUnknown, match="may be committed or not") as unknown,
    ):
        await committing
    assert isinstance(unknown.value.__cause__, cause)


@pytest.mark.parametrize("is_repaired", [True, False], ids=["repaired", "left"])
async def test_a_refused_repeat_does_not_settle_a_commit(
    tmp_path: Path, processes: Processes, *, is_repaired: bool
) -> None:
    """When the token was withdrawn after an attempt without an answer, the load may be committed:
    the commit waits for another token, and says so if none comes.
    """
    tokens, file = TokenBook(tmp_path, "root"), tmp_path / "token"
    file.write_text(tokens.text("root"))
    asking = ("--tokens-file", str(tokens.path), "--admins", "token:root")
    quick = {f"{OPTIONS}:_ATTEMPT_MS": 1_000}
    with constants(quick), capture_logs() as logs:
        async with ready(tmp_path, processes, *asking) as load:
            committer = Committer(load.store, None, timeout_s=TIMEOUT_S, token_file=str(file))
            load.server.pause()
            committing = asyncio.create_task(committer.commit(LOAD_ID, load.infos))
            repeated = partial(is_repeated, committing, logs)
            await until(lambda: repeated("no answer"), "the end of an attempt")
            file.write_text("an-unknown-token")
            load.server.resume()
            await until(lambda: repeated("writer: "), "a refused repeat")
            if is_repaired:
                file.unlink()
                await until(lambda: repeated("token_file: "), "a repeat without a file")
                file.write_text(tokens.text("root"))
                committed = await committing
                again = Committer(load.store, None, timeout_s=60, token_file=str(file))
                assert await again.commit(LOAD_ID, load.infos) == Committed(committed.seq, True)
            else:
                await end_unknown(committing, "_REFUSED_PAUSE_S", InvalidSetting)
                fresh = Committer(load.store, None, timeout_s=60, token_file=str(file))
                with pytest.raises(InvalidSetting, match="writer: "):
                    await fresh.commit(LOAD_ID, load.infos)


@pytest.mark.parametrize(
    "error",
    [PolicyUnknown("it may differ"), QueueFull("full", retry_after_ms=60_000), Stopping("ends")],
    ids=["access unknown", "overloaded", "stopping"],
)
async def test_a_commit_that_no_writer_has_begun_is_certain(
    tmp_path: Path, error: ShaleError
) -> None:
    """It was refused until the deadline, before anything was done: nothing is unknown."""
    refused = refusing(error)
    later = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=60))
    refused.status.details.add().Pack(later)  # than the deadline: no attempt is cut off by that
    with constants({f"{OPTIONS}:_PAUSE_S": TIMEOUT_S}):
        async with database(tmp_path) as (_, store), DictServer() as server:
            server.state.failures.append(refused)
            committer = Committer(store, server.address, timeout_s=TIMEOUT_S)
            with pytest.raises(DeadlinePassed, match=f"{error}. It is not committed: run the load"):
                await committer.commit(LOAD_ID, [])
            assert not server.state.loads


@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays away"])
async def test_a_manifest_that_is_not_read_does_not_settle_a_commit(
    tmp_path: Path, *, comes_back: bool
) -> None:
    """After an attempt without an answer, it is looked for again; the commit may be unknown."""
    quick = {f"{OPTIONS}:_ATTEMPT_MS": 200}
    manifests, away = tmp_path / "database" / "manifest", tmp_path / "away"
    with constants(quick), capture_logs() as logs:
        async with database(tmp_path) as (_, store), DictServer() as server:
            server.state.failures.append(silent())
            committer = Committer(store, server.address, timeout_s=TIMEOUT_S)
            committing = asyncio.create_task(committer.commit(LOAD_ID, []))
            repeated = partial(is_repeated, committing, logs)
            await until(lambda: repeated("no answer"), "the end of an attempt")
            manifests.rename(away)
            await until(lambda: repeated("no database"), "a repeat without a manifest")
            if comes_back:
                away.rename(manifests)
                assert (await committing).seq == 1
            else:
                await end_unknown(committing, "_PAUSE_S", DatabaseNotFound)


async def test_a_database_that_was_never_served_is_opened(tmp_path: Path) -> None:
    """A database whose manifest names no writer is opened for the commit."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, FEW)
        committer = Committer(store, None, timeout_s=TIMEOUT_S)
        await committer.check()
        assert not (await committer.commit(LOAD_ID, collect_reports(report).infos)).already_applied


async def test_a_writer_without_memory_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is repeated while the writer is overloaded."""
    refused = [Overloaded(ErrorDetails("here:1", "RESOURCE_EXHAUSTED", "too many loads"))]

    async def ingest(*_: object, **__: object) -> Ingested:
        if refused:
            raise refused.pop()
        return Ingested(7, 3, already_applied=False)

    monkeypatch.setattr(Client, "ingest", ingest)
    async with database(tmp_path) as (_, store):
        committed = await Committer(store, "127.0.0.1:1", timeout_s=TIMEOUT_S).commit(LOAD_ID, [])
        assert committed.seq == 7
