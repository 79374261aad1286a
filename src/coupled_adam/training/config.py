"""Import path of `load_config` in version 0.1; it is now in `coupled_adam.config.run_config`."""

from coupled_adam.config.run_config import Config, load_config

__all__ = ["Config", "load_config"]
