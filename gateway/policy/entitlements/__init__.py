"""What a tenant is owed: terms, service class, weight."""
