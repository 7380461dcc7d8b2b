"""Ends, forgets and repairs what nobody else does."""
