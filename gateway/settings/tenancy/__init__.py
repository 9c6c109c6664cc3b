"""Tenants and their keys: sections of the file, checks, and words of other gateways' files."""
