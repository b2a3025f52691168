"""`shalekv reader` as its operator meets it: start, refusals, take-over of the writer, the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.v1 import admin_pb2, kv_pb2, kv_pb2_grpc
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import admin_stub, kv_stub, reason_of

CALL_S = 60.0
ASKED_MAX = 20
UNCOMMITTED = kv_pb2.READ_LEVEL_UNCOMMITTED
LINEARIZABLE = kv_pb2.READ_LEVEL_LINEARIZABLE


async def put(stub: kv_pb2_grpc.KVStub, key: bytes, value: bytes) -> int:
    reply = await stub.Put(kv_pb2.PutRequest(key=key, value=value), timeout=CALL_S)
    return reply.header.seq


async def get(stub: kv_pb2_grpc.KVStub, key: bytes, **header: Any) -> kv_pb2.GetReply:
    request = kv_pb2.GetRequest(key=key, header=kv_pb2.RequestHeader(**header))
    return await stub.Get(request, timeout=CALL_S)


async def get_too_late(
    stub: kv_pb2_grpc.KVStub, header: kv_pb2.RequestHeader
) -> grpc.aio.AioRpcError:
    """Return the error of a get whose deadline passes.

    The server answers only just before that: if the timer of the client was faster, call again.
    """
    request = kv_pb2.GetRequest(key=b"k", header=header)
    for _ in range(ASKED_MAX):
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Get(request, timeout=1.0)
        if late.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or reason_of(late.value):
            return late.value
    raise AssertionError(f"not answered in time, {ASKED_MAX} times")


async def get_fresh(stub: kv_pb2_grpc.KVStub, max_staleness_ms: int) -> kv_pb2.GetReply:
    """A get that may not be staler than that.

    A reader that is held up while it polls refuses it: then call again.
    """
    for _ in range(ASKED_MAX):
        try:
            return await get(stub, b"k", max_staleness_ms=max_staleness_ms)
        except grpc.aio.AioRpcError as error:
            assert reason_of(error) == "TOO_STALE", error  # noqa: PT017 - it may happen
    raise AssertionError(f"too stale, {ASKED_MAX} times")


async def test_reads_show_what_was_written_and_how_old_it_may_be(
    processes: Processes, tmp_path: Path
) -> None:
    """A read with `min_seq` sees its write, one with `max_staleness_ms` is as new as that, and each
    reply has role, epoch, commit, WAL object and staleness.
    """
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE)
    reader = await database.read("--poll-interval-ms", "3600000")
    async with kv_stub(writer.listen) as writes, kv_stub(reader.listen) as reads:
        for number in range(20):
            seq = await put(writes, b"k", b"%d" % number)
            found = await get(reads, b"k", min_seq=seq)
            assert (found.value, found.header.seq) == (b"%d" % number, seq)
            assert found.header.role == kv_pb2.ROLE_READER
            assert found.header.epoch == 1
            assert found.header.HasField("wal_id")
        seq = await put(writes, b"k", b"last")
        stale = await get(reads, b"k")
        assert stale.header.seq <= seq
        fresh = await get_fresh(reads, max_staleness_ms=1_000)
        assert fresh.header.staleness_ms <= 1_000
        sent_s = time.monotonic()
        late = await get_too_late(reads, kv_pb2.RequestHeader(min_seq=seq + 1))
        assert time.monotonic() - sent_s < CALL_S
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(late) == "SEQ_NOT_REACHED"
    assert await reader.stop() == 0, reader.report()


async def test_what_is_for_the_writer_is_refused_with_its_address(
    processes: Processes, tmp_path: Path
) -> None:
    """Every kind of write, and reads that only the writer can answer, name the writer."""
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE)
    reader = await database.read()
    change = kv_pb2.Change(put=kv_pb2.PutChange(key=b"k"))
    async with kv_stub(reader.listen) as stub:
        calls: list[Callable[[], object]] = [
            lambda: stub.Put(kv_pb2.PutRequest(key=b"k"), timeout=CALL_S),
            lambda: stub.Delete(kv_pb2.DeleteRequest(key=b"k"), timeout=CALL_S),
            lambda: stub.DeleteRange(kv_pb2.DeleteRangeRequest(all=True), timeout=CALL_S),
            lambda: stub.Write(kv_pb2.WriteRequest(changes=[change]), timeout=CALL_S),
            lambda: stub.Txn(
                kv_pb2.TxnRequest(then=[kv_pb2.TxnOperation(change=change)]), timeout=CALL_S
            ),
            lambda: get(stub, b"k", read_level=UNCOMMITTED),
            lambda: get(stub, b"k", read_level=LINEARIZABLE),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call()  # type: ignore[misc]
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason_of(refused.value) == "NOT_THE_WRITER"
            assert writer.listen in (refused.value.details() or "")
    assert await reader.stop() == 0, reader.report()


async def test_reader_may_write_nothing(processes: Processes, tmp_path: Path) -> None:
    """A reader without a snapshot writes nothing, nor does one without a port.

    `test_reader_processes` has the end of readers with snapshots.
    """
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE)
    before = database.manifest()
    await database.run("reader", "--listen", writer.listen, code=ExitCode.ADDRESS_IN_USE)
    assert database.manifest() == before
    reader = await database.read("--snapshot", "none")
    async with admin_stub(reader.listen) as admin:
        status = await admin.Status(admin_pb2.StatusRequest(), timeout=CALL_S)
        stats = await admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
    assert status.reader.state == admin_pb2.ReaderStatus.STATE_FOLLOWING
    assert status.reader.writer_address == writer.listen
    assert status.reader.snapshot_id == b""
    assert not status.processes
    assert [each.role for each in stats.processes] == ["reader"]
    assert await reader.stop() == 0, reader.report()
    assert database.manifest() == before


async def test_reader_of_nothing_says_so(processes: Processes, tmp_path: Path) -> None:
    """Where there is no database, a reader ends with a code and a message, and writes nothing."""
    database, listen = Cluster(processes, tmp_path), ("--listen", "127.0.0.1:0")
    ended = await database.run("reader", *listen, code=ExitCode.DATABASE_NOT_FOUND)
    assert "holds no database" in ended.stderr()
    assert not database.folder.parent.exists()
