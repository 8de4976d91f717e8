"""The indexer of block-sparse attention: the best score of each block of keys, and the blocks to keep."""
