"""Configs of runs and of studies: every key, where values come from, what is wrong with them, and how they are written.

Nothing here imports torch.
"""
