"""Workers that step together, and what balances them."""
