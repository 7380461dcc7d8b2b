"""The contract between all processes: messages, keys, states, errors, hashes, Redis Functions."""
