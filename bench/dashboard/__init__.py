"""What the dashboard costs, and pictures of it."""
