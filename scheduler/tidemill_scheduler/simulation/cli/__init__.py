"""The commands ``tidemill simulate`` and ``tidemill calibrate``."""
