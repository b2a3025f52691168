"""Collection: deleting what no reader, writer or job can need any more."""
