"""State machines of a WAL in safekeepers: the opening, the proposer, and the acceptor."""
