"""Router of a mixture of experts: sigmoid scores, a bias that selects alone, the best few, their weights."""
