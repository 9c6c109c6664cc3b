"""BF-IO: balances data-parallel ranks that compute each step together."""
