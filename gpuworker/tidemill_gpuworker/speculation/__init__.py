"""Speculative decoding: tokens are guessed, computed in one step, and kept if they come true."""
