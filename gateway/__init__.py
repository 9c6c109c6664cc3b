"""Sluice's gateway: the request path from an OpenAI client to an LLM engine."""
