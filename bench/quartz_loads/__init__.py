"""The default scheduler over a grid of workloads, loads and fleets."""
