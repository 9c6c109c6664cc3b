"""BF-IO: balances KV load over the data-parallel ranks of an engine, which step together."""
