"""What the gateway costs beside its peers."""
