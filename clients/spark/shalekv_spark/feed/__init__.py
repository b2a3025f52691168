"""The change feed: the WAL of a database as a stream."""
