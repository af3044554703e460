"""``python -m ds_tsp``: what launchers start."""

from .cli import main

if __name__ == "__main__":
    main()
