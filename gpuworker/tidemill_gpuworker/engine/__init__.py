"""Sequences of tokens, run one step at a time."""
