"""The token-pools paper's experiments."""
