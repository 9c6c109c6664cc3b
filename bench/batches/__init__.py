"""Batches: whether promises are kept, and what they cost live requests."""
