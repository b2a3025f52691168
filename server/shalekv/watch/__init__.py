"""Watches: the commit feed, subscriptions by range, history, catching up, streams, consumers."""
