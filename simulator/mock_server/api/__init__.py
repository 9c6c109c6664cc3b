"""What the mock engine says over HTTP, in vLLM's and SGLang's dialects."""
