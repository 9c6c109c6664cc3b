"""Pools in phases against pools without, and the planner's choice."""
