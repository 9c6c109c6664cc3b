"""Pure decisions: no await, no clock, no I/O. Callers pass in time and randomness."""
