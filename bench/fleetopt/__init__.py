"""FleetOpt's tables, and plans put to the test."""
