"""Measurements of the project itself: `python benchmarks/NAME.py` from the repository's root."""
