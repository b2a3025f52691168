"""The writer's side of the quorum: what it holds, and how it follows each member."""
