"""Where leases, the directory of tenancy and learned figures live."""
