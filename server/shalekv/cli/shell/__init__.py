"""The prompt of `shalekv shell`: its language, its verbs, and the terminal."""
