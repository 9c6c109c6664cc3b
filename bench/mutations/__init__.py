"""Seeded faults, and whether the tests see them."""
