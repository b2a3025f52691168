"""Problems of a server, as its status tells: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shalekv.cli.console.units import share, size
from shalekv.wording import counted, duration_text
from shalekv_client import (
    CacheStatus,
    LevelsStatus,
    ProcessState,
    QuorumStatus,
    ReaderState,
    ReaderStatus,
    Readiness,
    Status,
)

# Figures from these on are worth a line.
NEARLY_FULL = 0.75  # of a limit at which writes wait or are refused
NEARLY_ALL = 0.9  # of the memory
LAGGING_RECORDS = 10_000  # of a safekeeper behind the majority
DEEP_READS = 12  # SSTs for one key
LOW_HIT_RATE = 0.5
READS_MIN = 1_000  # fewer reads are not significant
WASTED_SPACE = 2.0

_UNARCHIVED = "unarchived_log_bytes_max"  # the part of the memory for what is not in the store
_COMPACTOR = (
    "Check that a compactor runs (`shalekv serve` has one unless --no-with-compactor is given) and "
    "that it is not slower than the writes."
)
_NO_QUORUM = "no quorum"
_ADVICE: Mapping[str, str] = MappingProxyType(  # by the cause of a readiness
    {
        "store unreachable": (
            "Check the disk or the network, and the credentials of the server. It goes on by "
            "itself when the store answers."
        ),
        _NO_QUORUM: (
            "Start the safekeepers again, or replace one that is lost (`shalekv safekeeper "
            "replace`). Writes go on by themselves when a majority answers."
        ),
        "log full": "Give the safekeepers more disk space, and check that the store answers.",
        "process silent": "It is replaced when that lasts.",
    }
)
_READER: Mapping[ReaderState, tuple[str, str]] = MappingProxyType(
    {
        ReaderState.LOADING: ("the reader still loads the database", "Wait until it has."),
        ReaderState.GAP: (
            "the reader waits for a WAL object that is missing, though later ones are there",
            "It goes on when the writer has written it; if this lasts, check the writer.",
        ),
        ReaderState.CUT_OFF: (
            "the store does not answer the reader, which answers from the state that it has",
            _ADVICE["store unreachable"],
        ),
        ReaderState.FULL: ("the memory of the reader is full", _COMPACTOR),
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    text: str  # without a full stop
    advice: str  # what to do, in sentences


def problems(status: Status) -> Iterator[Problem]:
    """Yield what is wrong with a server; nothing: all is well."""
    yield from _of_readiness(status)
    yield from _of_processes(status)
    if status.reader is not None:
        yield from _of_reader(status.reader)
    if status.quorum is not None:
        yield from _of_safekeepers(status, status.quorum)
    yield from _of_limits(status)
    levels = status.levels
    if levels is not None and levels.read_amplification >= DEEP_READS:
        yield Problem(
            f"compaction is behind by about {size(levels.debt_bytes)}: reading a key opens up to "
            f"{levels.read_amplification} SSTs",
            _COMPACTOR,
        )
    if status.access is not None and status.access.audit_lines_lost:
        lost = counted(status.access.audit_lines_lost, "line")
        yield Problem(
            f"{lost} of the audit log could not be written since the start",
            "Check the disk of the audit log.",
        )


def _of_readiness(status: Status) -> Iterator[Problem]:
    """One problem for each cause, though both reads and writes may fail by it."""
    failing = _failing(status)
    reads, writes = failing.get("reads"), failing.get("writes")
    if reads is not None and writes is not None and reads.cause == writes.cause:
        longer = max(reads, writes, key=lambda each: each.unready_ms)
        failing = {"reads and writes": longer}
    for calls, readiness in failing.items():
        away = _away(status) if readiness.cause == _NO_QUORUM else []
        yield _not_ready(calls, readiness, away)


def _away(status: Status) -> Sequence[str]:
    """The addresses of the safekeepers that do not follow the writer."""
    members = status.quorum.members if status.quorum is not None else ()
    return [each.address for each in members if not each.is_connected]


def _failing(status: Status) -> dict[str, Readiness]:
    found = {"reads": status.read_readiness, "writes": status.write_readiness}
    return {calls: each for calls, each in found.items() if each and not each.is_ready}


def _not_ready(calls: str, readiness: Readiness, away: Sequence[str]) -> Problem:
    text = f"{calls} fail: {readiness.cause} for {duration_text(readiness.unready_ms)}"
    if readiness.problem:  # not shown to callers without the verb admin
        text += f": {readiness.problem.rstrip('.')}"
    unnamed = [address for address in away if address not in readiness.problem]
    if unnamed:
        text += f"; not connected: {', '.join(unnamed)}"
    return Problem(text, _ADVICE.get(readiness.cause, "The log of the server says more."))


def _of_processes(status: Status) -> Iterator[Problem]:
    for each in status.processes:
        if each.state is not ProcessState.SERVING:
            state = each.state.name.lower() if each.state else "in an unknown state"
            number = f"process {each.number} of {len(status.processes)}"
            advice = "The others serve; it is replaced or begins to serve within seconds."
            yield Problem(f"{number} is {state}", advice)


def _of_reader(reader: ReaderStatus) -> Iterator[Problem]:
    found = _READER.get(reader.state) if reader.state is not None else None
    if found is not None:
        yield Problem(*found)


def _of_safekeepers(status: Status, quorum: QuorumStatus) -> Iterator[Problem]:
    replace = "Start it again, or replace it (`shalekv safekeeper replace`)."
    is_told = any(each.cause == _NO_QUORUM for each in _failing(status).values())  # who is away
    for each in quorum.members:
        name = f"safekeeper {each.address}"
        behind = quorum.committed_lsn - each.flushed_lsn
        if not each.is_connected:
            if is_told:
                continue
            why = f" ({each.problem.rstrip('.')})" if each.problem else ""
            yield Problem(f"{name} does not follow the writer{why}", replace)
        elif each.is_full:
            yield Problem(f"{name} is full", _ADVICE["log full"])
        elif behind >= LAGGING_RECORDS:
            yield Problem(
                f"{name} is {counted(behind, 'record')} behind the majority",
                "Check its disk and its network; it catches up by itself.",
            )
    part = next((each for each in status.memory.parts if each.name == _UNARCHIVED), None)
    if part is not None and part.bytes > NEARLY_FULL * part.bytes_max:
        yield Problem(
            f"{share(part.bytes, part.bytes_max)} of the log are not in the store yet: at the "
            "limit writes wait",
            "Check that the store answers, and that a safekeeper archives (`shalekv safekeeper "
            "status`).",
        )


def _of_limits(status: Status) -> Iterator[Problem]:
    memtable, writer, memory = status.memtable, status.writer, status.memory
    if memtable.bytes > NEARLY_FULL * memtable.bytes_max:
        yield Problem(
            f"{share(memtable.bytes, memtable.bytes_max)} of writes are not merged into the levels "
            "yet: at the limit writes are refused",
            _COMPACTOR,
        )
    if writer is not None and writer.queued_bytes > NEARLY_FULL * writer.queued_bytes_max:
        yield Problem(
            f"{share(writer.queued_bytes, writer.queued_bytes_max)} of writes wait for the store: "
            "at the limit writes wait, too",
            "The store is slower than the writes: send fewer, or check the store.",
        )
    if memory.bytes > NEARLY_ALL * memory.bytes_max:
        yield Problem(
            f"{share(memory.bytes, memory.bytes_max)} of the memory for data are used",
            "Raise memory_bytes if the machine has more; `shalekv status -v` lists the parts.",
        )


def remarks(status: Status) -> Iterator[str]:
    """Yield what is not wrong, but may surprise: slow reads, wasted space, watches that ended."""
    levels, watches = status.levels, status.watches
    if levels is not None and levels.space_amplification >= WASTED_SPACE:
        yield (
            f"The levels take {levels.space_amplification:.1f} times the size of the lowest one: "
            "most of the data was overwritten, or compaction is behind."
        )
    if levels is not None:
        yield from _of_snapshots(status, levels)
    if status.reads is not None:
        yield from _of_cache("blocks", "block_cache_bytes", status.reads.blocks)
        yield from _of_cache("filters and indexes", "metadata_cache_bytes", status.reads.metadata)
    if watches is not None and watches.cut:
        ended = "1 watch was" if watches.cut == 1 else f"{watches.cut:,} watches were"
        yield f"{ended} ended since the start, too slow to take the commits."


def _of_snapshots(status: Status, levels: LevelsStatus) -> Iterator[str]:
    pinned = max((each.pinned_alone_bytes or 0 for each in status.snapshots), default=0)
    if pinned > levels.bytes:
        yield (
            f"One snapshot alone keeps {size(pinned)}, more than the levels have: see `shalekv "
            "snapshot list`."
        )


def _of_cache(what: str, setting: str, cache: CacheStatus) -> Iterator[str]:
    if cache.hits + cache.misses >= READS_MIN and cache.hit_rate < LOW_HIT_RATE:
        yield (
            f"Only {cache.hit_rate:.0%} of the reads of {what} are served from memory; the others "
            f"wait for the store. {setting} is {size(cache.bytes_max)}."
        )
