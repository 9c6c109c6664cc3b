"""The engine model in real time behind vLLM's HTTP surface: what `sluice mock` runs.

A request's walk: `app` routes it, `requests` reads and checks the body, `driver` runs its
sequences on the engine model, `generation` writes what comes out, `dialects` gives it shape,
`faults` spoils it on demand.
"""

from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.api.faults import FaultError, Faults, parse_faults
from simulator.mock_server.app import MockApp

__all__ = ["FaultError", "Faults", "MockApp", "MockConfig", "parse_faults"]
