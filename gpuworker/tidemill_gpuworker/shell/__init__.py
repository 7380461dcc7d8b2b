"""What ties an engine to the queue."""
