"""The choice of units within a budget, and the refusals."""
