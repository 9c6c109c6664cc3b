"""State stores: leases, token pools, entitlements and estimators, in memory, SQLite or Redis."""
