"""Accuracy of a model on the tasks of lm-evaluation-harness, evaluated on one machine or on two."""
