"""Planted bugs: what the simulation must notice. `registry` holds all of them."""
