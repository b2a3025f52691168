"""The log of one member of a quorum, in a folder of its own."""
