"""Read models: the results of a loop, read from its store alone, during the loop or after it."""
