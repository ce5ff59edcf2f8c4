"""Work beyond one process: Ray started or joined, and workers on it."""
