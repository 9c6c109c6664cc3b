"""Client connections: protocol, bounds, bodies, replies, TLS, error bodies."""
