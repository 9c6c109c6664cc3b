"""Sluice before real engines: vLLM on the CPU, with tiny models of random weights."""
