"""Causal attention of a few queries a row over the blocks of keys that each query and KV head has selected."""
