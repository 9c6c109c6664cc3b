"""`sluice budget`: budgets of a running gateway."""
