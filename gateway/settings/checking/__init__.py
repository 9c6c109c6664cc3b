"""Checks of a whole configuration that no single setting can make."""
