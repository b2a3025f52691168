"""A safekeeper: the logs of several databases, and what keeps them."""
