"""Which sequences run how many tokens in a step."""
