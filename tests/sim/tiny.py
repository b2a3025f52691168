"""Settings below the permitted minimum, so that few entries fill levels quickly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

from shalekv.settings import (
    CacheSettings,
    CollectorSettings,
    CompactorConfig,
    CompactorSettings,
    DatabaseSettings,
    LevelCodec,
    LevelSettings,
    WriterConfig,
    WriterSettings,
)
from tests.kit.constants import draw

POLICY = "shalekv.protocol.compaction.policy"
WINDOW_S = 86_400
LIVES_S = (3, 8, 20)  # of snapshots and leases, at pace 1
OPEN_TTL_S = 40  # of the snapshots of openers
NARROW = {"queued_bytes_max": 5_000, "admission_waiting_bytes_max": 4_000}  # a few writes fill them
LOADING = {"direct_ingest_bytes": 1_000}  # all batches without conditions are larger


def drawn_among(values: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the constants among `values`, and return the settings among them."""
    draw({name: value for name, value in values.items() if ":" in name})
    return {name: value for name, value in values.items() if ":" not in name}


def draw_settings(random: Random) -> WriterConfig:
    """The settings of one opening: they differ from one to the next."""
    return WriterConfig(
        database=DatabaseSettings(url="memory://sim"),
        writer=WriterSettings(
            max_parallel_writes=random.choice([1, 2, 4, 4]),
            flush_interval_ms=random.choice([0, 10, 50]),
            fence_poll_ms=random.choice([1_000, 5_000]),
            idempotency_window_s=random.choice([86_400] * 7 + [60]),
        ),
    )


def with_writer(settings: WriterConfig, update: Mapping[str, int]) -> WriterConfig:
    """The same with other settings of the writer, `NARROW` or `LOADING`."""
    return settings.model_copy(update={"writer": settings.writer.model_copy(update=update)})


def draw_writer(random: Random) -> WriterConfig:
    """Draw settings of a writer that keeps little in memory and reads the levels all the time."""
    drawn = draw_settings(random)
    writer = drawn.writer.model_copy(
        update={
            "snapshot_ttl_s": random.choice(LIVES_S),
            "fence_poll_ms": random.choice([200, 1_000]),
        }
    )
    segment_bytes = random.choice([1, 500, 5_000])
    sweep_ms = random.choice([0, 0, 30, 300])
    writer = writer.model_copy(update={"expiry_sweep_interval_ms": sweep_ms})
    draw(
        {
            "shalekv.write.expiry_sweep:EXPIRY_SCAN_INTERVAL_S": random.choice([0, 1]),
            "shalekv.write.recovery:OPEN_SNAPSHOT_TTL_S": OPEN_TTL_S,
            "shalekv.write.recovery:SEGMENT_BYTES_MAX": segment_bytes,
            "shalekv.write.expiry_sweep:EXPIRY_TRACKED_BYTES_MAX": random.choice(
                [0, 1_000, 1 << 20]
            ),
        }
    )
    cache = CacheSettings().model_copy(
        update={"block_cache_bytes": 0, "metadata_cache_bytes": random.choice([0, 1 << 20])}
    )
    limits = drawn.limits.model_copy(update={"scan_message_bytes": random.choice([1, 1 << 20])})
    return drawn.model_copy(update={"writer": writer, "cache": cache, "limits": limits})


def draw_compactor(random: Random, pace: float) -> CompactorConfig:
    levels = LevelSettings().model_copy(
        update={
            "sst_bytes": random.choice([40, 200, 10_000]),
            "block_bytes": random.choice([20, 100, 1_000]),
            "codec": random.choice([*LevelCodec]),
            "filter_bits": random.choice([0, 2, 10]),
        }
    )
    poll_ms = int(random.choice([100, 500]) * pace)
    compactor = CompactorSettings().model_copy(
        update=drawn_among(
            {
                "shalekv.settings.jobs:COMPACTOR_POLL_MS": poll_ms,
                "compactor_idle_poll_ms": 4 * poll_ms,
                f"{POLICY}:WAL_TRIGGER_COUNT": random.choice([1, 1, 3, 10]),
                "wal_trigger_age_ms": random.choice([0, 1_000]),
                "l0_trigger_count": random.choice([1, 1, 2, 4]),
                "base_level_bytes": random.choice([100, 300, 2_000]),
                f"{POLICY}:LEVEL_MULTIPLIER": random.choice([2, 4]),
                f"{POLICY}:COMPACTION_BYTES_MAX": random.choice([1_000, 1 << 20]),
                f"{POLICY}:TOMBSTONE_AGE_S": random.choice([1, 5]),
                "idempotency_record_kept_s": WINDOW_S,
                "expired_value_kept_s": random.choice([0, 0, 2, 3_600]),
                "compactor_lease_ttl_s": math.ceil(random.choice(LIVES_S) * pace),
            }
        )
    )
    return CompactorConfig(levels=levels, compactor=compactor)


def draw_collector(random: Random, pace: float) -> CollectorSettings:
    return CollectorSettings(
        collect_interval_ms=max(10, int(random.choice([100, 1_000]) * pace)),
        collect_age_s=random.choice([0, 0, 1, 5]),
        foreign_file_age_s=5,
        wal_retention_s=0,
    )
