"""Object stores and the compare-and-swap that rests on them."""
