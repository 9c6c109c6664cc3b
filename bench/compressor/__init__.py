"""Benches of compression: answers preserved, cost, fit."""
