"""Tenants and their keys while the gateway runs: the file's, and what administrators add."""
