"""The mock engine's HTTP bodies, in vLLM's and SGLang's dialects."""
