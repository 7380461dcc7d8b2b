"""What a ``Producer`` can do, by what it is for, each beside its asynchronous twin.

The classes hold no state of their own: they declare which parts of the client they work with, and
``tidemill.client`` and ``tidemill.async_client`` make the parts.
"""
