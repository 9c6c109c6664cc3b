"""The engine model in real time behind vLLM's HTTP API: `sluice mock` runs it.

A request passes through `app` (routes), `requests` (reads and checks the body), `driver` (runs
its sequences on the engine model), `generation` (writes tokens), `dialects` (the API's format)
and `faults` (errors on demand).
"""

from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.api.faults import FaultError, Faults, parse_faults
from simulator.mock_server.app import MockApp

__all__ = ["FaultError", "Faults", "MockApp", "MockConfig", "parse_faults"]
