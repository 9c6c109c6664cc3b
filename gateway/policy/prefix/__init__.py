"""Estimate how much of a prompt each worker holds in its prefix cache."""
