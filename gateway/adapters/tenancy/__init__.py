"""Tenancy at run time: tenants, entitlements and keys in step with the directory and the file."""
