"""Process chaos: seeded faults against real processes, judged offline from a recorded history."""
