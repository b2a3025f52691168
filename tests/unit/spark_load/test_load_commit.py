"""Who commits a load: the writer that answers, and nobody by mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shalekv.core.sst_table import SstInfo
from shalekv.errors import InvalidSetting, OutcomeUnknown
from shalekv.store.cas import CasStore
from shalekv_client import Client, ErrorDetails, Overloaded
from shalekv_client.ingest import Ingested
from shalekv_spark.loading.commit import OPEN, Committer, gathered
from shalekv_spark.place import Place
from tests.kit.processes.child import Child
from tests.kit.processes.deaf_proxy import deaf_proxy
from tests.kit.processes.meanwhile import ALONE
from tests.kit.processes.processes import Processes
from tests.unit.spark_load.ground import LOAD_ID, Row, begun, current, database, write

TIMEOUT_S = 60.0
ROWS = [Row(b"a", b"1"), Row(b"b", b"2")]


@dataclass(frozen=True, slots=True)
class Ready:
    """A served database, and files of a load that only its commit is missing of."""

    server: Child
    store: CasStore
    infos: list[SstInfo]

    def committer(self, writer: str | None, timeout_s: float = TIMEOUT_S) -> Committer:
        return Committer(self.store, writer, timeout_s=timeout_s)

    async def found(self) -> dict[bytes, bytes]:
        async with Client(self.server.listen) as client:
            return {entry.key: entry.value async for entry in client.scan()}


@asynccontextmanager
async def ready(folder: Path, processes: Processes) -> AsyncIterator[Ready]:
    place = Place(f"file://{folder}/database")
    server = await processes.serve(place.url, *ALONE)
    async with place.open() as store:
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, ROWS)
        yield Ready(server, store, [*gathered(report).infos])


LOADED = {b"a": b"1", b"b": b"2"}


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Ends what the test has started."""
    with Processes() as running:
        yield running


async def test_the_writer_of_the_manifest_is_asked(tmp_path: Path, processes: Processes) -> None:
    """It goes on as the writer; asked again it says that the load stands."""
    async with ready(tmp_path, processes) as load:
        committer = load.committer(None)
        await committer.check()
        first = await committer.commit(LOAD_ID, load.infos)
        again = await committer.commit(LOAD_ID, load.infos)
        assert (first.already_applied, again.already_applied) == (False, True)
        assert again.seq == first.seq
        assert await load.found() == LOADED
        assert (await current(load.store)).writer_epoch == 1


async def test_a_writer_that_does_not_answer_is_not_fenced(
    tmp_path: Path, processes: Processes
) -> None:
    """The error says what to pass instead, before the load and at its commit; what was passed then
    commits it.
    """
    async with ready(tmp_path, processes) as load:
        await load.server.kill()
        with pytest.raises(InvalidSetting, match=r"nobody answers .* pass writer='open'"):
            await load.committer(None).check()
        with pytest.raises(OutcomeUnknown, match="run the load again with the same load_id"):
            await load.committer(None, 0.2).commit(LOAD_ID, load.infos)
        assert (await current(load.store)).writer_epoch == 1
        committer = load.committer(OPEN)
        await committer.check()
        assert not (await committer.commit(LOAD_ID, load.infos)).already_applied
        assert (await current(load.store)).writer_epoch == 2


async def test_a_lost_reply_is_asked_for_again(tmp_path: Path, processes: Processes) -> None:
    """The commit stands although nobody heard of it; whoever asks again learns so."""
    async with ready(tmp_path, processes) as load, deaf_proxy(load.server.listen) as proxy:
        deaf = load.committer(proxy.listen, 1.5)
        await deaf.check()
        proxy.go_deaf_at(LOAD_ID.encode())
        with pytest.raises(OutcomeUnknown):
            await deaf.commit(LOAD_ID, load.infos)
        assert await load.found() == LOADED
        again = await load.committer(load.server.listen).commit(LOAD_ID, load.infos)
        assert again.already_applied
        assert (await begun(load.store)).committed_seq == again.seq


async def test_the_writer_of_another_database_is_refused(
    tmp_path: Path, processes: Processes
) -> None:
    """Before anything is written for it."""
    other = await processes.serve(f"file://{tmp_path}/other", *ALONE)
    async with ready(tmp_path, processes) as load:
        with pytest.raises(InvalidSetting, match="serves database"):
            await load.committer(other.listen).check()


async def test_a_database_that_was_never_served_is_opened(tmp_path: Path) -> None:
    """Its manifest names no writer, so nobody can be fenced by mistake."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, ROWS)
        committer = Committer(store, None, timeout_s=TIMEOUT_S)
        await committer.check()
        assert not (await committer.commit(LOAD_ID, gathered(report).infos)).already_applied


async def test_a_writer_without_room_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the compactor is behind for a while, what took hours to write is not given up."""
    refused = [Overloaded(ErrorDetails("here:1", "RESOURCE_EXHAUSTED", "too many loads"))]

    async def ingest(*_: object, **__: object) -> Ingested:
        if refused:
            raise refused.pop()
        return Ingested(7, 3, already_applied=False)

    monkeypatch.setattr(Client, "ingest", ingest)
    async with database(tmp_path) as (_, store):
        committed = await Committer(store, "127.0.0.1:1", timeout_s=TIMEOUT_S).commit(LOAD_ID, [])
        assert committed.seq == 7
