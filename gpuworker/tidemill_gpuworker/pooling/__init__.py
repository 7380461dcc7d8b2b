"""Embeddings and scores: text in, one vector or number out, no tokens."""
