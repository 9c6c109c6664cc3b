"""What awaits the outside: engines, probes, stores, files."""
