"""The HTTP face of the queue: OpenAI's API, served by a producer without any state of its own.

Any number of gateways may run: a request is jobs, and jobs live in Redis.  ``create_app`` makes the
ASGI application, ``python -m tidemill.gateway`` serves it.
"""
