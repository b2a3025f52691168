"""What must hold of a database at rest, as checks of values: the rules behind `shalekv fsck`."""
