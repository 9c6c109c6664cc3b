"""Compression in processes of their own, off the event loop."""
