"""Two-phase compare-and-swap, for stores without conditional writes."""
