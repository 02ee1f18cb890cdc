"""Files that survive a kill: atomic writes and the run folder."""
