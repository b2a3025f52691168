"""The files of a safekeeper: logs of records, what was promised, and one sync for many appends."""
