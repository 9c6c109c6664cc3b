"""What an engine answers: usage, proper ends, errors and refusals."""
