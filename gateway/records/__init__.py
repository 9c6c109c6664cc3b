"""Frozen records that pass between the steps of a request."""
