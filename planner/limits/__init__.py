"""What a plan may not go beyond, and what it may not fall below."""
