"""K/V outside the process: page stores on disk and in Redis, and the guard that keeps a bad one from costing time."""
