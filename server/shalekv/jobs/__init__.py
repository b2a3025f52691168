"""Jobs that run beside the writer: compaction, collection, backups, clones, checks, loads."""
