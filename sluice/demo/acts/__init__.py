"""The acts of the demo's story, one module each: traffic, and what it measured, in a sentence."""
