"""The write-ahead log on a quorum of safekeepers."""
