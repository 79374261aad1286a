"""What a model can do: its accuracy on the tasks of lm-evaluation-harness, on one machine or on two."""
