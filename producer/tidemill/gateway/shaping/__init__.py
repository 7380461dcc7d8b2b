"""From what jobs produce to the JSON that OpenAI's clients expect; pure."""
