"""Scores against target labels."""
