"""A run folder -> one self-contained HTML page."""
