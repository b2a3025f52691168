"""Which server a call goes to: addresses, connections, roles, attempts, and what was seen."""
