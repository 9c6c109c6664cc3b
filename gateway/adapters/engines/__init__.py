"""Engines as they describe themselves: probes, metrics pages, KV capacity."""
