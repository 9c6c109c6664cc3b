"""Client connections: the HTTP protocol, its limits, and the writing of answers."""
