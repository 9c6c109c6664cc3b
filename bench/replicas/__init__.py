"""Several gateways on one Redis, and outages of Redis."""
