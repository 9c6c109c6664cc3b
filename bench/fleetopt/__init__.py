"""FleetOpt's tables, and plans checked by simulation and replay."""
