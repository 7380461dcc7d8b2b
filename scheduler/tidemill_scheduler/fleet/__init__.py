"""What the scheduler knows of the workers, and what it does about dead ones."""
