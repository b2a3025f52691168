"""Reading: the memtable, the levels (`Version`, `VersionSet`), lookups, scans and caches."""
