"""The engine model: the same code in virtual time for planning and in real time for the mock."""
