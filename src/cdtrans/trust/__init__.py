"""Reasons to believe a run, or not to: every one of them without a target label."""
