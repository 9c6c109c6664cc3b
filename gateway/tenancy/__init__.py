"""Tenants, keys, entitlements and tokens: what is in force, and how it changes."""
