"""The attention of a draft block in one pass: the cached context and the block's own keys."""
