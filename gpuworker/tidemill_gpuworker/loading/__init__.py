"""From a model's name or directory to weights and settings."""
