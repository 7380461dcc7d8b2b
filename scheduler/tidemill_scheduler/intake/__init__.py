"""How jobs come to the scheduler."""
