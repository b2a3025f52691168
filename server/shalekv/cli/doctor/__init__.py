"""The checks of `shalekv doctor`: facts are gathered, then judged by pure functions."""
