"""Per-head norm, rotary embedding and cache writes of projected queries, keys and values."""
