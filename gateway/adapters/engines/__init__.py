"""Reads the state of engines: health probes, metrics pages, KV capacity."""
