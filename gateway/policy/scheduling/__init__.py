"""The Scheduler protocol, fairness between clients, and the simple schedulers."""
