"""QUARTZ beside the peers' routers, in real time."""
