"""The report site in a real Chromium, from files: light and dark, without a request, with content in each
picture.

RELAYD_REQUIRE_CHROMIUM=1 turns the absence of a Chromium into a failure.
"""

from __future__ import annotations

import pytest
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.reports.site import RelayScore, SiteFigures, render_site
from strata_pipeline.reports.traffic import TrafficFigures, render_traffic

from tests.pipeline.jobs.test_report import figures
from tests.support.browsers import SCHEMES, axe_missing, browser, missing, violations, watched

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


def traffic() -> str:
    """A report on traffic with a value in each picture, and a table that is too wide for a phone."""
    hours = [{"hour_at": hour * 3_600, "packets": hour % 24, "near_duplicates": 0} for hour in range(24, 300)]
    did = "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH"
    who = {"author_id": did, "packets": 9, "size": 9, "near_duplicates": 1, "peak_packets": 3}
    burst = {"author_id": did, "hour_at": 0, "packets": 9, "peak_packets": 9, "threshold": 5.5}
    names = ("packets", "size", "authors", "near_duplicates", "bursts", "clusters", "abuse")
    told = TrafficFigures(
        note=LakeNote("ab" * 32, "1970-01-02", "1970-01-13", 12),
        totals=dict.fromkeys(names, 1),
        hourly=hours,
        authors=[who],
        types=[{"content_type": "POST", "packets": 10, "size": 9999}],
        bursts=[burst],
        clusters=[],
        abuse=[],
    )
    return render_traffic(told)


async def test_the_week_of_traffic_is_seen_and_its_fullest_hour_is_told(tmp_path):
    (tmp_path / "traffic.html").write_text(traffic())
    async with browser() as opened:
        for scheme in SCHEMES:
            url = f"{tmp_path.as_uri()}/traffic.html"
            async with watched(opened, url, color_scheme=scheme) as (page, watch):
                await page.goto(url)
                look = await page.evaluate(LOOK)
                week = page.locator("section", has_text="In a week")
                opacities = await week.locator("rect.s0").evaluate_all(
                    "all => all.map((one) => Number(getComputedStyle(one).fillOpacity))"
                )
                about = await week.locator("p").inner_text()
                assert (watch.foreign, watch.errors) == ([], [])
            assert all(look["pictures"]) and look["beyond"] == 0
            assert len(opacities) == 168 and min(opacities) == 0 and max(opacities) == 1
            assert about.endswith("The fullest cell stands for 23.")


@pytest.mark.skipif(axe_missing() is not None, reason=str(axe_missing()))
async def test_whoever_hears_a_report_or_has_no_mouse_misses_nothing(tmp_path):
    (tmp_path / "traffic.html").write_text(traffic())
    url = f"{tmp_path.as_uri()}/traffic.html"
    async with browser() as opened:
        for scheme in SCHEMES:
            for width in (390, 1280):
                size = {"width": width, "height": 800}
                async with watched(opened, url, color_scheme=scheme, viewport=size) as (page, _):
                    await page.goto(url)
                    assert await violations(page) == []
