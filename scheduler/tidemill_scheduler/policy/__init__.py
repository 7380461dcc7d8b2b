"""Which job runs next, and where: pure decisions over plain data, without I/O or a clock."""
