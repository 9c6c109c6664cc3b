"""`sluice demo`: a whole fleet on this machine, and traffic that shows what the gateway does."""
