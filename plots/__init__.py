"""Figures and the comparison summary, made from run folders alone."""
