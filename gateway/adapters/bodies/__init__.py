"""Reads large request bodies in a separate process, off the event loop."""
