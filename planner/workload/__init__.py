"""Workloads: distributions of request lengths, and sums over them."""
