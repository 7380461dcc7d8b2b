"""Model architectures that the native path runs."""
