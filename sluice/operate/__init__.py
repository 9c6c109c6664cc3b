"""What an operator, and a client, does to a running gateway."""
