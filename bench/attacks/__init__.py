"""Structure-aware hostile clients over raw sockets."""
