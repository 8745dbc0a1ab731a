"""Tasks in the Harbor format: a folder with instruction, environment, tests and solution."""
