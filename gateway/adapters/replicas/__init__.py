"""What replicas exchange, and where they listen."""
