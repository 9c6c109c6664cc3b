"""How cost grows with workers, entitlements and leases."""
