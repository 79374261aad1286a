"""Checkpoints of a training run: contents, file format, saving in the background, and loading."""
