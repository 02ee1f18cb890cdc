"""Figures 2a and 2b of the paper, rerun."""
