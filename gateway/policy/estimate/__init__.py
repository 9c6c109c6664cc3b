"""Predict how many tokens a request will take, and learn from the usage of served requests."""
