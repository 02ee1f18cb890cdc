"""Pairs of source and target images (section 3.2 of the paper)."""
