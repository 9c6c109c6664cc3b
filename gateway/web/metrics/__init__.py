"""The /metrics page."""
