"""A pytest plugin: what Hypothesis has found is not made smaller, for a planted bug is known already."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "unshrunk", phases=(Phase.explicit, Phase.generate), database=None, deadline=None, print_blob=False
)
