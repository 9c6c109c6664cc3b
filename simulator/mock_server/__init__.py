"""The engine model in real time behind vLLM's HTTP surface: what `sluice mock` runs.

A request's walk: `app` routes it, `requests` reads and checks the body, `driver` runs its
sequences on the engine model, `generation` writes what comes out, `dialects` gives it shape,
`faults` spoils it on demand.
"""

from simulator.mock_server.app import MockApp
from simulator.mock_server.config import MockConfig
from simulator.mock_server.faults import FaultError, Faults, parse_faults

__all__ = ["FaultError", "Faults", "MockApp", "MockConfig", "parse_faults"]
