"""Jobs beside the writer: compaction, collection, backup, cloning, checks, bulk loads."""
