"""A load under way: what is sent, what is certain, and where it goes on after a kill."""
