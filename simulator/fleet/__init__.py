"""A fleet in virtual time, run by the gateway's own decision code."""
