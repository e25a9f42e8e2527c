"""The benchmark runs and its plot is well-formed; its figures mean nothing here."""

from __future__ import annotations

from xml.etree import ElementTree

from benches.sds import measure
from benches.sds_plot import plot


def test_the_benchmark_measures_and_draws() -> None:
    figures = list(measure([20, 600]))
    assert [figure["messages"] for figure in figures] == [20, 600]
    assert all(figure["wraps_per_second"] > 0 and figure["receives_per_second"] > 0 for figure in figures)
    root = ElementTree.fromstring(plot({"strata.sds": figures, "another": figures[:1]}))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 6
