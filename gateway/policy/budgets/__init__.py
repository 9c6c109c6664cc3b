"""What keys, entitlements and tenants may use over all models: windows of time, and counters."""
