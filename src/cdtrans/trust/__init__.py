"""Is the data suitable for a run, and can its result be trusted? Without target labels."""
