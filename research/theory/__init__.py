"""The supplement's two theorems, simulated."""
