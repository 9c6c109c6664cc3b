"""Clients' connections: the protocol, its limits, and how answers are written."""
