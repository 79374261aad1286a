"""Checkpoints of a training run: what is saved, its files, saving in the background, loading."""
