"""`sluice calibrate`."""
