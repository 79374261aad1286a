"""`python -m coupled_adam` is `coupled-adam`: what torchrun starts."""

from coupled_adam.cli import main

if __name__ == "__main__":
    main()
