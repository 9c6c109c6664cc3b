"""`sluice compress`."""
