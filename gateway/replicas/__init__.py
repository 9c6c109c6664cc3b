"""What gateways tell one another."""
