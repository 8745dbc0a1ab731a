"""Read models: what came of a loop, read from its store alone, while the loop runs or after it."""
