"""Entitlements of tenants: terms, service class, weight."""
