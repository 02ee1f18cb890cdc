"""Is the data fit for a run, and can its result be believed? All without a target label."""
