"""What benches share: fleets of real processes, reports, texts, measuring tools."""
