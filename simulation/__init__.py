"""Predicted step and epoch times: the model, clusters from files, and comparisons with records."""
