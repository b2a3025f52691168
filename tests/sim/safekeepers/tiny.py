"""Settings of safekeepers and of what writes to them, far below what is allowed."""

from __future__ import annotations

from random import Random

from shalekv.settings import (
    ArchiveSettings,
    ArchivingSettings,
    QuorumSettings,
    SafekeeperSettings,
    SafekeeperTransport,
    SafekeepSettings,
    ServeSettings,
)
from tests.sim.safekeepers.hosts import DATA, URL
from tests.sim.tiny import draw_writer

MUCH_BYTES = 1 << 30


def draw_safekeeper(random: Random, pace: float) -> SafekeepSettings:
    """Those of a node with small files, that looks often at what is archived."""
    safekeeper = SafekeeperSettings().model_copy(
        update={
            "data": str(DATA),
            "disk_free_bytes_min": random.choice([0, 1]),
            "segment_bytes": random.choice([1_500, 4_000, 16_000]),
            "recent_bytes_max": random.choice([0, 2_000, MUCH_BYTES]),
            "unarchived_bytes_max": random.choice([MUCH_BYTES, MUCH_BYTES, MUCH_BYTES, 30_000]),
            "append_queue_bytes_max": random.choice([1, 2_000, MUCH_BYTES]),
            "relay_queue_bytes_max": random.choice([2_000, MUCH_BYTES]),
            "piece_bytes_max": random.choice([500, MUCH_BYTES]),
            "tail_heartbeat_ms": random.choice([1_000, 5_000]),
            "retire_interval_ms": int(random.choice([2_000, 20_000]) * pace),
        }
    )
    archiving = ArchivingSettings().model_copy(
        update={
            "archive_parallel_uploads": random.choice([1, 4]),
            "archive_upload_timeout_ms": int(random.choice([1_000, 20_000]) * pace),
            "archive_look_interval_ms": int(random.choice([500, 3_000]) * pace),
            "archive_manifest_interval_ms": int(random.choice([2_000, 20_000]) * pace),
            "archive_unasked_ms": int(random.choice([1_000, 10_000]) * pace),
            "archive_pause_ms": random.choice([0, 20]),
            "archive_read_bytes": random.choice([500, MUCH_BYTES]),
        }
    )
    return SafekeepSettings(
        database=ArchiveSettings(url=URL), safekeeper=safekeeper, archiving=archiving
    )


def draw_quorum_writer(random: Random) -> ServeSettings:
    """Those of a writer whose log is in safekeepers."""
    drawn = draw_writer(random)
    quorum = QuorumSettings().model_copy(
        update={
            "safekeeper_connect_timeout_ms": random.choice([300, 3_000]),
            "vote_timeout_ms": random.choice([3_000, 15_000]),
            "quorum_timeout_ms": random.choice([500, 5_000]),
            "reply_timeout_ms": random.choice([1_000, 10_000]),
            "parallel_appends": random.choice([1, 8]),
            "send_queue_bytes_max": random.choice([500, MUCH_BYTES]),
            "safekeeper_transport": random.choice([*SafekeeperTransport]),
            "chain_timeout_ms": random.choice([20, 300]),
            "commit_broadcast": random.choice([False, True]),
            "held_log_bytes_max": random.choice([20_000, MUCH_BYTES]),
            "archive_interval_ms": random.choice([0, 50, 300, 2_000]),
            "archive_object_bytes": random.choice([1_000, MUCH_BYTES]),
            "archive_takeover_ms": random.choice([500, 5_000]),
        }
    )
    writer = drawn.writer.model_copy(update={"flush_interval_ms": random.choice([0, 0, 10])})
    return drawn.model_copy(update={"quorum": quorum, "writer": writer})
