"""Methods x tasks x seeds -> tables."""
