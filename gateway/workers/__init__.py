"""Processes that compress prompts and read large bodies."""
