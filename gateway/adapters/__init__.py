"""Implementations of the ports: everything that does I/O (engines, stores, files)."""
