"""Writes decision records, audit lines and usage."""
