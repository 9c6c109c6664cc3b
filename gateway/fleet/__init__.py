"""Workers: load, health, polling, discovery, joining and leaving, LoRA adapters."""
