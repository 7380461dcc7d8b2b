"""Files and batches of OpenAI's API, over Redis and the blob store.

The gateway and the command line use ``client``; what works on a batch (``tidemill_scheduler``'s
batch runner) uses the rest, which is pure.
"""
