"""KV blocks: who holds them, what they contain and where."""
