"""The commands of `coupled-adam`, one file each. torch is imported inside the commands that need it."""
