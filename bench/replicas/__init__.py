"""Several gateways on one Redis, and Redis away."""
