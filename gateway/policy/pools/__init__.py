"""Choose the pool for a request, and move the boundaries between pools."""
