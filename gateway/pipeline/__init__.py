"""The request: its ten steps in order, repeated on failures, and settled exactly once."""
