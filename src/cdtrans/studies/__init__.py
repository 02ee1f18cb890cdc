"""Studies: variants x tasks x seeds -> runs -> tables."""
