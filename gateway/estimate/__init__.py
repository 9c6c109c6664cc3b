"""Tokens of prompt and answer, learned from `usage`."""
