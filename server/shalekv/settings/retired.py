"""Settings of the previous release that do not exist any more, by their keys in a file.

A configuration that still has one is refused with this advice. Entries are kept for one release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Old key -> new key.
RENAMED: Mapping[str, str] = {
    "writer.waiting_bytes_max": "writer.admission_waiting_bytes_max",
    "writer.queue_wait_ms": "writer.admission_timeout_ms",
    "writer.skip_memtable_bytes": "writer.direct_ingest_bytes",
    "quorum.held_log_bytes_max": "quorum.unarchived_log_bytes_max",
    "compactor.record_kept_s": "compactor.idempotency_record_kept_s",
    "compactor.expired_kept_s": "compactor.expired_value_kept_s",
    "collector.foreign_age_s": "collector.foreign_file_age_s",
    "safekeeper.retire_interval_ms": "safekeeper.log_retire_interval_ms",
    "archiving.archive_look_interval_ms": "archiving.archive_list_interval_ms",
}

# Old key -> the reason, or what decides now.
REMOVED: Mapping[str, str] = {
    "collector.fence_age_s": "fences are never deleted any more, since a writer that was stalled "
    "for longer than their age lost acknowledged writes",
}


def retirement(given: str, form: Callable[[str], str]) -> str:
    """What became of the setting `given`; empty if it is not retired.

    `form` maps a key such as ``writer.flush_bytes`` to its name in the source of `given`.
    """
    for key, new_key in RENAMED.items():
        if form(key) == given:
            return f"was renamed to {form(new_key)}"
    for key, reason in REMOVED.items():
        if form(key) == given:
            return f"was removed: {reason}"
    return ""
