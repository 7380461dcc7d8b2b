"""The worker: an engine with a paged KV cache, and the shell that ties it to the queue."""
