"""Reading: memtable, levels, versions of the tree, lookups and scans."""
