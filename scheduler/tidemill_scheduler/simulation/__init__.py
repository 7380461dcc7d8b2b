"""A simulated cluster that drives the production scheduler: traces, workers, events, reports."""
