"""A pytest plugin that keeps Hypothesis from shrinking its findings, as a planted bug is already known."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "unshrunk", phases=(Phase.explicit, Phase.generate), database=None, deadline=None, print_blob=False
)
