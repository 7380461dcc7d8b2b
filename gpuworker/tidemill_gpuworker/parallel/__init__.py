"""One model over several processes: parts of its layers, and layers of its whole."""
