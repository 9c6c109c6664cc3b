"""Read an engine's answer: usage, how it ended, errors and refusals."""
