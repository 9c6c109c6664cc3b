"""Growth of cost with workers, entitlements and leases."""
