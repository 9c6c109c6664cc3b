"""What requests cost and used: prices, budgets, ledger, export, request log, audit."""
