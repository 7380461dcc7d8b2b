"""The store of values too large for Redis: files, batches' output."""
