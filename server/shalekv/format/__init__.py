"""Pure translation between bytes and core types."""
