"""What budgets hold under load, and what they cost."""
