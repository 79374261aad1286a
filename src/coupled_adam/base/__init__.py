"""The floor that every other part stands on: imports nothing of ours, and only the standard library when loaded."""
