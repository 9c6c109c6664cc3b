"""Pure decisions: no await, no clock, no I/O. Time and randomness are arguments."""
