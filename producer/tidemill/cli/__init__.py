"""The ``tidemill`` command; it starts other processes by name and imports none of them."""
