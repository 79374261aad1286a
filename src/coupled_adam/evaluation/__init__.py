"""Finished models: their weights from a run, and their way into other programs."""
