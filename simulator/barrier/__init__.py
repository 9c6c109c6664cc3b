"""Workers that step together behind a barrier, and policies that balance them."""
