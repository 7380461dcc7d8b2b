"""Works off batches: validates, feeds their lines to the queue, assembles what comes back.

The leading scheduler keeps one process (``python -m tidemill_scheduler.batches``) for that while
there are batches, because reading and writing lines would hold up its own loop.
"""
