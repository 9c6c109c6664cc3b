"""A fleet in virtual time behind the gateway's own decisions."""
