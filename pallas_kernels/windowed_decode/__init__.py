"""Causal attention of a few queries a row over a paged or ring cache, with a window and the log-sum-exp."""
