"""Research tasks: the format, grading, leaderboards, the built-in suite, programs for it."""
