"""How many tokens a request will take, learned from what requests took."""
