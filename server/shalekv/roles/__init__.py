"""The loops of each role, and what a role answers to a request."""
