"""Experiments on simulated fleets, called by benchmarks and the planner."""
