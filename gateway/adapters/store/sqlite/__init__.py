"""Keeps the embedded store's state across restarts, in one SQLite file."""
