"""Watches: which commits concern which watcher, history, catching up, and streams."""
