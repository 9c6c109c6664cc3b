"""Traces and engines' histograms, read as workloads."""
