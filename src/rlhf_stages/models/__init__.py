"""Models: loading, heads, adapters, saving."""
