"""The report site in a real Chromium, from files: light and dark, without a request, with content in each
picture.

RELAYD_REQUIRE_CHROMIUM=1 turns the absence of a Chromium into a failure.
"""

from __future__ import annotations

import pytest
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.reports.site import RelayScore, SiteFigures, render_site

from tests.pipeline.jobs.test_report import figures
from tests.support.browsers import SCHEMES, browser, missing, watched

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

EVIL = "wss://<script>alert(1)</script>"
LOOK = """
() => {
    const background = getComputedStyle(document.body).backgroundColor;
    const seen = (shape) => {
        const { fill, stroke } = getComputedStyle(shape), box = shape.getBBox();
        const painted = [fill, stroke].some((colour) => colour !== "none" && colour !== background);
        return painted && box.width + box.height > 0;
    };
    const pictures = [...document.querySelectorAll("svg")].map((svg) => {
        const shapes = [...svg.querySelectorAll("path, rect, circle")].filter((one) => !one.matches(".grid"));
        const { width, height } = svg.getBoundingClientRect();
        return width > 100 && height > 30 && shapes.some(seen);
    });
    return {
        background,
        ink: getComputedStyle(document.body).color,
        heading: document.querySelector("h1").innerText,
        pictures,
        beyond: document.documentElement.scrollWidth - innerWidth,
    };
}
"""


async def test_pages_are_whole_in_light_and_dark_and_ask_for_nothing(tmp_path):
    days = [figures(f"2026-11-{n:02}", n) for n in range(1, 13)]
    scores = [RelayScore(at, url, at / 10, "active") for at in (1, 2, 3) for url in ("wss://a", EVIL)]
    note = LakeNote("ab" * 32, "2026-11-01", "2026-11-12", 12)
    site = render_site(SiteFigures(note, days, {"2026-W45": 40, "2026-W46": 41, "2026-11": 77}, scores))
    for name, text in site.items():
        (tmp_path / name).write_text(text)
    found = {}
    async with browser() as opened:
        for scheme in SCHEMES:
            async with watched(opened, tmp_path.as_uri(), color_scheme=scheme) as (page, watch):
                for name in sorted(site):
                    await page.goto(f"{tmp_path.as_uri()}/{name}")
                    found[scheme, name] = await page.evaluate(LOOK)
                assert (watch.foreign, watch.errors) == ([], [])
    for (scheme, name), look in found.items():
        assert look["heading"], name
        assert all(look["pictures"]), (scheme, name, look)
        assert look["beyond"] <= 0, (scheme, name, look)
        assert look["background"] != look["ink"]
    # Scores of relays are only a table.
    assert {name for (_, name), look in found.items() if look["pictures"]} == {*site} - {"relays.html"}
    light, dark = ({look["background"] for (s, _), look in found.items() if s == one} for one in SCHEMES)
    assert len(light) == len(dark) == 1 and light != dark
