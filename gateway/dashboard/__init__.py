"""The dashboard: its page, and one snapshot a second for all viewers."""
