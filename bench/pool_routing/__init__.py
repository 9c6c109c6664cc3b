"""The token-budget paper's tables."""
