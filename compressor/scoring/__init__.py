"""The value of each unit: the question, relevance to it, centrality, position, novelty."""
