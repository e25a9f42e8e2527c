"""The generated pages agree with the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from relayd.metrics import Metrics, SupervisorMetrics

ROOT = Path(__file__).parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_in_step() -> None:
    for path, text in generator().pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: run `make docs`"


def test_every_metric_is_in_the_reference_with_its_kind_and_meaning() -> None:
    page = generator().metrics_page()
    for family in [*Metrics().registry.collect(), *SupervisorMetrics().restarts["died"].collect()]:
        if family.name.startswith("relayd_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
            assert row.split(" | ")[1] == family.type and family.documentation in row
            shown = {label for sample in family.samples for label in sample.labels} - {"le"}
            assert all(f"`{label}`" in row.split(" | ")[2] for label in shown)


def test_every_command_is_in_the_reference() -> None:
    page = generator().commands_page()
    for command in ("relayd serve", "strata publish", "strata relays probe", "strata-pipeline archive"):
        assert f" {command}\n" in page
    assert page.count("```text") > 25
