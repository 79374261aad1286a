"""Trained models: load their weights from a run, evaluate them, export them."""
