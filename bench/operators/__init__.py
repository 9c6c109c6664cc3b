"""Histories of unlucky operators, by the thousand."""
