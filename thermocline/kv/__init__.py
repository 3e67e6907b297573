"""The key-value cache: `blocks` decides which block belongs to whom, `pool` holds the numbers."""
