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
    "archiving.archive_look_interval_ms": "archiving.archive_list_interval_ms",
    "archiving.archive_unasked_ms": "archiving.archive_unappointed_ms",
}

# Old key -> the reason, or what decides now.
REMOVED: Mapping[str, str] = {
    "collector.fence_age_s": "fences are never deleted any more, since a writer that was stalled "
    "for longer than their age lost acknowledged writes",
    "server.concurrent_streams_max": "a connection has at most 256 calls in progress",
    "server.metadata_bytes_max": "the metadata of a call has at most 16 KiB",
    "server.handshake_timeout_ms": "a connection that has not sent HTTP/2 after 10 seconds is "
    "closed",
    "server.connection_idle_ms": "a connection without calls is closed after 5 minutes",
    "server.connection_age_grace_ms": "calls may continue for 30 seconds after their connection "
    "has reached connection_age_ms",
    "server.ping_interval_min_ms": "a client without data may ping every 20 seconds",
    "children.child_restart_initial_ms": "the first delay is half a second, and doubles",
    "children.child_restart_max_ms": "the longest delay is a minute",
    "children.child_takeover_ms": "the own compactor is started again when writes were delayed "
    "for 30 seconds",
    "children.child_grace_ms": "a child process is sent SIGTERM after 5 seconds, and SIGKILL "
    "after 5 more",
    "store.multipart_part_bytes": "a part has 16 MiB",
    "store.multipart_uploads_max": "4 parts of an SST are uploaded at once",
    "store.multipart_abort_age_s": "the collector aborts an unfinished upload that is a day old",
    "store.retry_initial_ms": "the first delay before a request is repeated is 50 milliseconds",
    "store.retry_max_ms": "the longest delay before a request is repeated is 2 seconds",
    "store.connect_timeout_ms": "connecting to the object store fails after 5 seconds",
    "writer.wal_block_bytes": "a block of a WAL object has 64 KiB",
    "writer.open_snapshot_ttl_s": "the snapshot of an opening writer lives for 10 minutes, and "
    "is renewed",
    "writer.memtable_segment_bytes": "it is an eighth of memtable_bytes_max, at most 8 MiB",
    "writer.expiry_tracked_bytes": "it is an eleventh of memtable_bytes_max, at most 1 GiB",
    "writer.expiry_scan_bytes": "8 MiB a second are scanned for expired values",
    "writer.replay_parallel_reads": "a replay fetches 16 WAL objects at once",
    "writer.retry_after_ms": "a refused write is advised to wait 200 milliseconds",
    "reader.poll_interval_min_ms": "polls for a WAL object are at least 20 milliseconds apart",
    "reader.reader_parallel_reads": "a reader fetches up to 16 WAL objects at once",
    "cache.read_ahead_bytes_max": "it is a 24th of scan_ahead_bytes_max, at most 1 MiB",
    "watches.watch_stream_bytes_max": "it is a quarter of watch_bytes_max, at most 4 MiB",
    "compactor.recent_loads_max_count": "the last 1,000 loads and streams of loads are remembered",
    "compactor.compactor_poll_ms": "a compactor checks for work every second while there is some, "
    "or every compactor_idle_poll_ms if that is less",
    "compactor.wal_trigger_count": "WAL objects are merged into L0 from 512 on, however small",
    "compactor.level_multiplier_count": "each level is 10 times larger than the one above it; "
    "l0_trigger_count and base_level_bytes shape the levels",
    "compactor.compaction_bytes_max": "a compaction of levels reads at most 1 GiB, unless it "
    "cannot be smaller",
    "compactor.tombstone_age_s": "an SST with many tombstones is merged down after an hour",
    "quorum.reply_timeout_ms": "the writer connects again to a safekeeper that has not answered "
    "for 10 seconds",
    "quorum.send_queue_bytes_max": "8 MiB of records are sent to a safekeeper ahead of its answers",
    "quorum.chain_timeout_ms": "a member of the chain that acknowledges nothing for 300 "
    "milliseconds is sent records directly",
    "quorum.archive_object_bytes": "a WAL object in the archive has at most 8 MiB",
    "quorum.archive_takeover_ms": "another safekeeper is appointed when nothing was archived for "
    "5 seconds",
    "safekeeper.append_queue_bytes_max": "64 MiB of the appends of a writer wait for the disk",
    "safekeeper.relay_queue_bytes_max": "16 MiB wait to be forwarded to another safekeeper",
    "safekeeper.piece_bytes_max": "a message to a replica or a writer has 1 MiB of records",
    "safekeeper.tail_heartbeat_ms": "a replica receives a message each second",
    "archiving.archive_upload_timeout_ms": "an upload that takes longer than a minute is begun "
    "again",
    "archiving.archive_pause_ms": "checks for complete WAL objects are at least 20 milliseconds "
    "apart",
    "archiving.archive_read_bytes": "4 MiB of a log are read at once",
    "watches.watch_count_max": "a server has at most 100,000 watches",
    "limits.snapshot_view_count_max": "the state of 32 snapshots is kept open for reads, within "
    "snapshot_view_bytes_max",
    "limits.seq_wait_ms_max": "a read without a deadline waits for 30 seconds for its min_seq",
    "writer.expiry_scan_interval_s": "SSTs are scanned for expired values every 10 minutes",
    "limits.result_wait_ms": "a scan waits for memory for 10 seconds, or for twice "
    "result_stalled_ms if that is longer",
    "collector.deletes_per_s_count": "the collector deletes at most 1,000 objects a second",
    "writer.uncompacted_loads_max_count": "at most 64 loads are not compacted",
    "archiving.archive_manifest_interval_ms": "a safekeeper checks each minute that a manifest "
    "still names it",
    "quorum.safekeeper_connect_timeout_ms": "connecting to a safekeeper, and waiting for its first "
    "answer, fails after 3 seconds",
    "quorum.parallel_appends": "at most 8 groups of writes are in flight to the safekeepers",
    "archiving.archive_parallel_uploads": "4 WAL objects of a database are uploaded at once",
    "reader.reader_open_timeout_ms": "a reader that starts tries for a minute to put its snapshot "
    "into the manifest",
    "safekeeper.retire_interval_ms": "a safekeeper checks each minute for logs that are not "
    "needed any more",
    "limits.compare_count_max": "a comparison of a range passes at most 10,000 deleted or expired "
    "keys",
    "limits.delete_range_count_max": "a Write, and each branch of a Txn, has at most 100 range "
    "deletes",
    "limits.session_bytes_max": "it is half of sessions_bytes_max, at most 8 MiB",
    "watches.watch_stalled_ms": "the watches of a stream whose client takes nothing for a minute "
    "are closed",
}


def retirement(given: str, form: Callable[[str], str]) -> str:
    """Return what became of the setting `given`; empty if it is not retired.

    `form` maps a key such as ``writer.flush_bytes`` to its name in the source of `given`.
    """
    for key, new_key in RENAMED.items():
        if form(key) == given:
            return f"was renamed to {form(new_key)}"
    for key, reason in REMOVED.items():
        if form(key) == given:
            return f"was removed: {reason}"
    return ""
