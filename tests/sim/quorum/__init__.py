"""The pure core of the quorum WAL under chaos: simulated disks, streams, manifest and archive."""
