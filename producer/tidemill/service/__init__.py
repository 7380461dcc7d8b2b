"""What every process shares: configuration, Redis, broker, metrics, logging, shutdown."""
