"""What is wrong with an installation: pure checks over facts read in few round trips."""
