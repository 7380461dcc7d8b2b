"""The demo model: fetched, converted and kept."""
