"""A run from two folders to a finished run folder."""
