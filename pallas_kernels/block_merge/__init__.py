"""The keys of the block that lie after each query, merged into an attention that has seen the keys before it."""
