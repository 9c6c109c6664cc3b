"""Admission for requests that another proxy forwards."""
