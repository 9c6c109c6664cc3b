"""Shared by benches: fleets of real processes, reports, texts, measuring tools."""
