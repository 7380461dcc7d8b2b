"""What every process shares: settings, the broker, logs, metrics, tokenizers and its own end."""
