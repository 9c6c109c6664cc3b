"""Admin routes of tenants and their keys."""
