"""The embedded store's state in one SQLite file, kept over restarts."""
