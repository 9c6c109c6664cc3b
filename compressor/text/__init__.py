"""The text of a prompt as arrays: characters, units, passages, blocks, terms."""
