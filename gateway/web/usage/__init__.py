"""Usage reports over HTTP."""
