"""Who calls, what the caller may do and use, and what is noted of it."""
