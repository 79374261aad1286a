"""Optimizer files of AdamW become files of CoupledAdamW, and back: what `coupled-adam convert` does."""
