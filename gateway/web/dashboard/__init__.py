"""The dashboard: one page, and the figures that it shows while somebody looks."""
