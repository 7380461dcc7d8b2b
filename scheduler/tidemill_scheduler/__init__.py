"""The scheduler daemon: it decides which job goes to which worker, and next."""
