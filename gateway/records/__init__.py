"""Frozen records that pass between the stages; no behaviour beyond small derived values.

Each stage takes named inputs and returns its own record, so a reader sees what a stage needs and
what it gives.
"""
