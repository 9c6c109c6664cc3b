"""Builds and connects everything: the application, models, reload, processes."""
