"""Tasks in the Harbor format, as others wrote them: a folder with instruction, environment, tests and solution."""
