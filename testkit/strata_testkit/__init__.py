"""What tests a relay or a program of yours: conformance checks of any relay, and a simulator of channels.

`conformance` judges a relay from outside, row by row; `sim` runs real channels on a network that fails on
demand, under a virtual clock. Both are commands of `strata` too, once this distribution is installed.
"""

from __future__ import annotations

__all__: list[str] = []
