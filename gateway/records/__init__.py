"""Frozen records that pass between the stages; no behaviour beyond small derived values.

Each stage takes named inputs and returns its own record: its signature shows its inputs and
outputs.
"""
