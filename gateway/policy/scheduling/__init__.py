"""What a scheduler is, fairness between clients, and the simple schedulers."""
