"""Cost of the gateway compared with its peers."""
