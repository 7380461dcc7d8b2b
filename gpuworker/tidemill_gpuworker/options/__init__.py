"""The worker's command line."""
