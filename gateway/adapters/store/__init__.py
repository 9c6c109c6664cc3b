"""Lease stores behind the one port."""
