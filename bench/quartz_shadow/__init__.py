"""Predictions in the shadow of another policy, and what a switch to QUARTZ brings."""
