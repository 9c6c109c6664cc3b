"""Entitlements changed at run time: directory, keyring and token pools in step."""
