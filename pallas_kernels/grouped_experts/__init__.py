"""Mixture-of-experts MLP over stacks of weights in their own format; experts that no row chose are not read."""
