"""Simulated fleets and gateways from command lines, plans and files."""
