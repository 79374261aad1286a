"""The documented name of `load_config` in version 0.1; it lives in `coupled_adam.config.run_config`."""

from coupled_adam.config.run_config import Config, load_config

__all__ = ["Config", "load_config"]
