"""Configs of runs and studies: their keys, loading, validation and TOML output. Does not import torch."""
