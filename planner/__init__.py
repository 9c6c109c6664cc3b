"""The analytic fleet planner: how many nodes, how many pools, which boundary, which gamma.

Everything here is a function of values: no clock, no network, no event loop. The sources are
FleetOpt (arXiv:2603.16514) and token-budget pool routing (arXiv:2604.09613), both CC BY 4.0;
docs/plan/planner.md says what of them holds.
"""
