"""Large request bodies, read in a process of their own."""
