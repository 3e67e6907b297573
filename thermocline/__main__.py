"""`python -m thermocline`: the same as the `thermocline` command."""

from __future__ import annotations

from thermocline.cli import main

if __name__ == "__main__":
    main()
