"""PURE: the quorum WAL as decisions. Records and logs, acceptor, proposer, membership."""
