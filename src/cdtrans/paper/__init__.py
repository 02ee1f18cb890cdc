"""What reproduces the paper: printed tables, ablations, figures, theorems."""
