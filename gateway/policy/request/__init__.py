"""What a request asks for: its body, head and form, read, counted and edited."""
