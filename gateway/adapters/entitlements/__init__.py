"""Entitlements that change at run time: keeps directory, keyring and token pools consistent."""
