"""Writing: the write-ahead log, group commit, recovery, and the engine of a writer."""
