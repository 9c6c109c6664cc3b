"""Experiments on simulated fleets that benchmarks and the planner call."""
