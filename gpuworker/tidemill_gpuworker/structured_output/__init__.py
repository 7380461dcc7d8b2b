"""Answers of a given form: grammars compiled off the step loop, and the masks they make."""
