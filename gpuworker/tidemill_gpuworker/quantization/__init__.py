"""Linear layers whose weights are stored, or kept in memory, in 4 or 8 bits."""
