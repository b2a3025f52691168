"""Divides the memory of a server: settings that are not set share the rest by weight.

Each part is bounded where it is used. When it is full:

    memtable, queued, admission_waiting   writes wait, then are refused: `write.admission`
    unarchived_log                        appends wait, then writes are refused: `write.quorum.wal`
    reader_memtable                       the reader falls behind: `replica.apply`
    block_cache, metadata_cache           the least recently used are evicted: `read.cache`
    read_in_flight                        reads wait: `read.read_budget`
    scan_ahead, result                    stalled scans are ended, others wait: `server.scans`
    sessions                              stalled ones are ended, others slowed: `rpc.session`
    snapshot_view                         snapshots are not kept open: `read.snapshot_views`
    watch                                 watches read the WAL instead: `watch.stream`

The number of calls in progress is bounded as well: `rpc.adapter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from shalekv.settings import GIB, KIB, MIB, ReaderConfig, Settings, WriterConfig

ServingSettings: TypeAlias = WriterConfig | ReaderConfig
ServingT = TypeVar("ServingT", WriterConfig, ReaderConfig)


class _Share(NamedTuple):
    group: str
    name: str
    weight: int


# The weights of settings that are not set, if the process has the group. Their sum is 64 for a
# writer and for a reader, so that round budgets have round parts.
_SHARES = (
    _Share("writer", "memtable_bytes_max", 22),
    _Share("reader", "reader_memtable_bytes_max", 31),
    _Share("writer", "queued_bytes_max", 4),
    _Share("writer", "admission_waiting_bytes_max", 2),
    _Share("quorum", "unarchived_log_bytes_max", 3),
    _Share("cache", "block_cache_bytes", 11),
    _Share("cache", "metadata_cache_bytes", 6),
    _Share("cache", "read_in_flight_bytes", 4),
    _Share("cache", "scan_ahead_bytes_max", 3),
    _Share("limits", "result_bytes_max", 3),
    _Share("limits", "sessions_bytes_max", 2),
    _Share("limits", "snapshot_view_bytes_max", 2),
    _Share("watches", "watch_bytes_max", 2),
)


class _Follower(NamedTuple):
    """A setting that is not part of the budget, but is derived from one that is."""

    group: str
    name: str
    of: tuple[str, str]
    numerator: int
    denominator: int
    bytes_max: int  # more is of no use


_MEMORY = ("memory", "memory_bytes")
_MEMTABLE = ("writer", "memtable_bytes_max")
_FOLLOWERS = (
    # A batch of this size has to fit beside others.
    _Follower("writer", "direct_ingest_bytes", _MEMTABLE, 1, 8, 16 * MIB),
    # An entry of 16 + 100 bytes takes 436 bytes of memory and 130 of WAL, so this begins well
    # before half of the memtable is full. Smaller ones take more memory: then `hurry` begins it.
    _Follower("compactor", "wal_trigger_bytes", _MEMTABLE, 1, 8, 1 * GIB),
    # The shape of the levels follows from the size of one merge of the WAL.
    _Follower("compactor", "base_level_bytes", _MEMTABLE, 3, 2, 1024 * GIB),
    # A batch is in memory twice: as a message and as entries.
    _Follower("limits", "batch_bytes_max", _MEMORY, 1, 8, 64 * MIB),
    # Several scans can reach their limit at once.
    _Follower("limits", "scan_message_bytes", ("limits", "result_bytes_max"), 1, 96, 256 * KIB),
)

FROM_THE_BUDGET = frozenset((each.group, each.name) for each in (*_SHARES, *_FOLLOWERS))


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The parts of the memory budget in bytes, by the names of their settings."""

    memory_bytes: int
    parts: dict[str, int]

    @property
    def sum_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


def memory_budget(settings: ServingSettings) -> MemoryShares:
    """Return the parts of the budget in `settings`."""
    shares = [share for share in _SHARES if hasattr(settings, share.group)]
    parts = {share.name: _value(settings, share.group, share.name) for share in shares}
    return MemoryShares(settings.memory.memory_bytes, parts)


def with_memory_shares(settings: ServingT) -> ServingT:
    """Return `settings` with values, derived from `memory_bytes`, for what was not set.

    Where several processes serve, the values are those of each: all were divided by their number.

    Raises ValueError when what was set leaves too little; the message begins with the name of the
    setting to raise.
    """
    processes = _process_count(settings)
    if processes > 1:
        settings = _replaced(settings, dict(_divided(settings, processes)))
    settings = _replaced(settings, dict(_shares(settings)))
    followers: dict[tuple[str, str], int] = {}
    for each in _FOLLOWERS:
        if hasattr(settings, each.group) and not _is_set(settings, each.group, each.name):
            base = _value(settings, *each.of)
            wanted = min(base * each.numerator // each.denominator, each.bytes_max)
            followers[each.group, each.name] = max(wanted, _least(settings, each.group, each.name))
    return _replaced(settings, followers)


def _process_count(settings: ServingSettings) -> int:
    return settings.reader.processes if isinstance(settings, ReaderConfig) else 1


def _divided(settings: ServingSettings, processes: int) -> Iterator[tuple[tuple[str, str], int]]:
    given = [each[:2] for each in _SHARES if hasattr(settings, each.group)]
    for group, name in [_MEMORY, *(each for each in given if _is_set(settings, *each))]:
        size_bytes = _value(settings, group, name) // processes
        least_bytes = _least(settings, group, name)
        if size_bytes < least_bytes:
            raise ValueError(
                f"memory_bytes and its parts are divided among {processes} processes, and "
                f"{_amount(size_bytes)} of {name} for each is less than {_amount(least_bytes)}"
            )
        yield (group, name), size_bytes


def _shares(settings: ServingSettings) -> Iterator[tuple[tuple[str, str], int]]:
    memory_bytes = settings.memory.memory_bytes
    shares = [share for share in _SHARES if hasattr(settings, share.group)]
    given = [share for share in shares if _is_set(settings, share.group, share.name)]
    open_ = [share for share in shares if share not in given]
    given_bytes = sum(_value(settings, share.group, share.name) for share in given)
    rest_bytes = memory_bytes - given_bytes
    weights = sum(share.weight for share in open_)
    for share in open_:
        size_bytes = rest_bytes * share.weight // weights
        if size_bytes < _least(settings, share.group, share.name):
            raise ValueError(_too_little(settings, given, share))
        yield (share.group, share.name), size_bytes
    if rest_bytes < 0:
        raise ValueError(_too_little(settings, given, None))


def _too_little(settings: ServingSettings, given: list[_Share], short: _Share | None) -> str:
    memory_bytes = settings.memory.memory_bytes
    amounts = [f"{each.name} {_amount(_value(settings, each.group, each.name))}" for each in given]
    taken = " and ".join(", ".join(amounts).rsplit(", ", 1))
    left = "is more than that" if short is None else f"leaves too little for {short.name}"
    return (
        f"memory_bytes is {_amount(memory_bytes)}, and what is set of it ({taken}) {left}: "
        "raise memory_bytes, or set less"
    )


def _amount(size_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} bytes"


def _is_set(settings: ServingSettings, group: str, name: str) -> bool:
    model: Settings = getattr(settings, group)
    return name in model.model_fields_set


def _value(settings: ServingSettings, group: str, name: str) -> int:
    value: int = getattr(getattr(settings, group), name)
    return value


def _least(settings: ServingSettings, group: str, name: str) -> int:
    rules = type(getattr(settings, group)).model_fields[name].metadata
    least: int = next(rule.ge for rule in rules if hasattr(rule, "ge"))
    return least


def _replaced(settings: ServingT, values: dict[tuple[str, str], int]) -> ServingT:
    groups: dict[str, dict[str, int]] = {}
    for (group, name), value in values.items():
        groups.setdefault(group, {})[name] = value
    update = {
        group: getattr(settings, group).model_copy(update=changes)
        for group, changes in groups.items()
    }
    return settings.model_copy(update=update)
