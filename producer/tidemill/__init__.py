"""Tidemill."""
