"""Which worker probably holds how much of a prompt in its prefix cache."""
