"""Runs the causal language models of `transformers` over our paged KV cache."""
