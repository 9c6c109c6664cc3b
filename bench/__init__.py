"""Reproductions of the papers and measurements of the gateway; not in the wheel."""
