"""The engine model: one model, virtual time for planning and real time for the mock."""
