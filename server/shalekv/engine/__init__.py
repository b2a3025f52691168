"""The engine: group commit, memtable, scans, replay."""
