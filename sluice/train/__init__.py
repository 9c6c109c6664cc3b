"""`sluice train`."""
