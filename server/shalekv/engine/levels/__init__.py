"""Reading the SSTs of the levels, through caches that are bounded in bytes."""
