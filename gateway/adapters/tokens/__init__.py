"""Tokens (JWT) of identity providers: their keys, and the check of a token. Of the extra `jwt`."""
