"""Read traces and engines' histograms as workloads."""
