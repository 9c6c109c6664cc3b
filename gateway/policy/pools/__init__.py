"""Which pool serves a request, and where the boundaries between pools lie."""
