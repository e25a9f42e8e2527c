"""`python -m relayd` is `relayd`."""

from __future__ import annotations

from relayd.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
