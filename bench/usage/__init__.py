"""What prices and the ledger cost a request."""
