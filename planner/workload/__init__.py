"""What arrives: distributions of lengths, and sums over them."""
