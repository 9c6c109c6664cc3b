"""A gateway before mock engines: estimates, real lengths, faults."""
