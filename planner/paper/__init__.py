"""FleetOpt's published fleets, as published."""
