"""The paper's printed tables, and the settings and methods of its ablations."""
