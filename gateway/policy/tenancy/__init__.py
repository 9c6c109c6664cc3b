"""Tenancy: what the file, administrators and denials give tenants together."""
