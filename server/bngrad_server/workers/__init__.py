"""Worker processes: the pool that starts and restarts them, and the program that they run."""
