"""The division of the memory of a serving process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from shalekv.settings import (
    GIB,
    KIB,
    MIB,
    AnyConfig,
    ReaderConfig,
    WriterConfig,
    WriterSettings,
)
from shalekv.settings.budget import FROM_THE_BUDGET, memory_budget, with_memory_shares

Groups = Mapping[str, Any]


def given(memory_bytes: int = 512 * MIB, **groups: Any) -> WriterConfig:
    memory = {"memory_bytes": memory_bytes}
    return WriterConfig.model_validate(
        {"database": {"url": "memory://x"}, "memory": memory, **groups}
    )


def test_the_defaults_are_the_shares_of_the_default_budget() -> None:
    """The defaults of settings are the shares of the default budget, for a writer and for a
    reader, whose parts sum up to it. A reader has no queue of writes, and uses that share
    for its memtable.
    """
    plain = {"database": {"url": "memory://x"}}
    writer, reader = WriterConfig.model_validate(plain), ReaderConfig.model_validate(plain)
    assert with_memory_shares(writer) == writer
    assert with_memory_shares(reader) == reader
    for settings in (writer, reader):
        assert memory_budget(settings).sum_bytes == settings.memory.memory_bytes
    assert reader.reader.reader_memtable_bytes_max >= writer.writer.memtable_bytes_max


@pytest.mark.parametrize("memory_bytes", [16 * MIB, 32 * MIB, 33 * MIB + 1, 256 * MIB, 64 * GIB])
def test_the_parts_are_the_budget(memory_bytes: int) -> None:
    """The parts sum up to the budget except for rounding, and each is within its limits."""
    settings = with_memory_shares(given(memory_bytes))
    budget = memory_budget(settings)
    assert memory_bytes - len(budget.parts) < budget.sum_bytes <= memory_bytes
    WriterConfig.model_validate(settings.model_dump())


@pytest.mark.parametrize("memory_bytes", [16 * MIB, 512 * MIB, 64 * GIB])
def test_what_follows_fits_its_part(memory_bytes: int) -> None:
    """Compaction begins before half of the memtable is full of entries of 16 + 100 bytes,
    and one batch, one message and one session leave space for others.
    """
    settings = with_memory_shares(given(memory_bytes))
    writer, limits = settings.writer, settings.limits
    assert settings.compactor.wal_trigger_bytes * 436 // 130 < writer.memtable_bytes_max // 2
    assert writer.direct_ingest_bytes * 8 <= writer.memtable_bytes_max
    assert limits.batch_bytes_max * 8 <= memory_bytes
    assert limits.scan_message_bytes * 24 <= limits.result_bytes_max
    assert limits.session_bytes_max * 2 <= limits.sessions_bytes_max


def test_what_is_set_stays_and_the_rest_is_shared() -> None:
    """A setting that was given does not change, and what it takes is not given to others."""
    settings = with_memory_shares(
        given(32 * MIB, cache={"block_cache_bytes": 0}, writer={"memtable_bytes_max": 20 * MIB})
    )
    budget = memory_budget(settings)
    assert budget.parts["block_cache_bytes"] == 0
    assert budget.parts["memtable_bytes_max"] == 20 * MIB
    assert budget.parts["queued_bytes_max"] == 12 * MIB * 4 // 31
    assert 32 * MIB - len(budget.parts) < budget.sum_bytes <= 32 * MIB
    assert settings.compactor.wal_trigger_bytes == 20 * MIB // 8
    assert with_memory_shares(settings) == settings  # divided shares count as set


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"writer": {"memtable_bytes_max": 1 * GIB}},
            r"memory_bytes is 512 MiB, .* \(memtable_bytes_max 1 GiB\) leaves too little for ",
        ),
        (
            {"writer": {"memtable_bytes_max": 500 * MIB}, "cache": {"block_cache_bytes": 12 * MIB}},
            "memtable_bytes_max 500 MiB and block_cache_bytes 12 MiB. leaves too little",
        ),
        (
            {
                "writer": dict.fromkeys(
                    ("memtable_bytes_max", "queued_bytes_max", "admission_waiting_bytes_max"),
                    100 * MIB,
                ),
                "cache": dict.fromkeys(
                    (
                        "block_cache_bytes",
                        "metadata_cache_bytes",
                        "read_in_flight_bytes",
                        "scan_ahead_bytes_max",
                    ),
                    100 * MIB,
                ),
                "limits": dict.fromkeys(
                    ("result_bytes_max", "sessions_bytes_max", "snapshot_view_bytes_max"),
                    300 * KIB,
                ),
                "watches": {"watch_bytes_max": 300 * KIB},
                "quorum": {"unarchived_log_bytes_max": 300 * KIB},
            },
            "is more than that",
        ),
    ],
)
def test_what_does_not_fit_is_refused(groups: Groups, message: str) -> None:
    """Settings that do not fit are refused, with the amounts and the setting to raise."""
    with pytest.raises(ValueError, match=message):
        with_memory_shares(given(512 * MIB, **groups))


def test_processes_of_a_reader_divide_the_budget() -> None:
    """Each of several processes has an equal part of all, of what was set as well."""
    groups: dict[str, object] = {
        "database": {"url": "memory://x"},
        "memory": {"memory_bytes": 64 * MIB},
        "cache": {"block_cache_bytes": 20 * MIB},
        "disk_cache": {"disk_cache_bytes": 1 * GIB},
    }
    whole, each, too_many = (
        ReaderConfig.model_validate(groups | {"reader": {"processes": processes}})
        for processes in (1, 2, 5)
    )
    one, half = memory_budget(with_memory_shares(whole)), memory_budget(with_memory_shares(each))
    assert half.parts == {name: size_bytes // 2 for name, size_bytes in one.parts.items()}
    assert with_memory_shares(each).disk_cache == whole.disk_cache  # shared by all
    with pytest.raises(ValueError, match=r"memory_bytes .* 5 processes.* less than 16 MiB"):
        with_memory_shares(too_many)


def test_all_names_are_settings() -> None:
    """The names of all shares and derived settings are settings that exist."""
    settings = AnyConfig.model_validate({"database": {"url": "memory://x"}})
    for group, name in FROM_THE_BUDGET:
        assert isinstance(getattr(getattr(settings, group), name), int)


def test_bytes_may_have_a_unit() -> None:
    """Bytes may be given as text with a unit; decimal megabytes are refused."""
    for text, size_bytes in (
        ("2MiB", 2 * MIB),
        ("1024 KiB", 1 * MIB),
        ("1GiB", GIB),
        ("1048577", MIB + 1),
    ):
        settings = WriterSettings.model_validate({"memtable_bytes_max": text})
        assert settings.memtable_bytes_max == size_bytes
    for text in ("2MB", "2 mib", "MiB", "-1MiB", "1.5GiB", "1MiB "):
        with pytest.raises(ValueError, match="valid integer"):
            WriterSettings.model_validate({"memtable_bytes_max": text})
