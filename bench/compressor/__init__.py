"""What survives compression, what it costs, whether it fits."""
