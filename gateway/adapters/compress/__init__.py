"""Compresses prompts in worker processes, off the event loop."""
