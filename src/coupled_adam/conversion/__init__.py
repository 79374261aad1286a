"""Convert optimizer files between AdamW and CoupledAdamW, for `coupled-adam convert`."""

from coupled_adam.conversion.checkpoint_conversion import Conversion, convert_checkpoint

__all__ = ["Conversion", "convert_checkpoint"]
