"""Files of pairs: TSV, CSV and NDJSON, read for `load` and written by `dump`."""
