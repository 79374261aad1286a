"""Optimizer files of AdamW become files of CoupledAdamW, and back: what `coupled-adam convert` does."""

from coupled_adam.conversion.checkpoint_conversion import Conversion, convert_checkpoint

__all__ = ["Conversion", "convert_checkpoint"]
