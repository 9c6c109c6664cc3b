"""The default scheduler over the whole ground of workloads, loads and fleets."""
