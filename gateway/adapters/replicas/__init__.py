"""Communication among replicas: shared notes, calls and listening sockets."""
