"""A draft's token in two launches: the Markov bias, the law's peak and mass, and the draw."""
