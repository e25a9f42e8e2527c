"""The generated pages agree with the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import msgspec
from strata.protocol import streams, wire
from strata.tools.cli import output
from strata_pipeline.cli.app import exit_code
from strata_pipeline.errors import LogUnavailable, UsageError

from relayd import exit_codes
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


def test_every_message_is_in_the_reference_with_all_its_members() -> None:
    page = generator().wire_page()
    messages = wire._Message.__subclasses__()
    assert len(messages) == 14
    for message in messages:
        _, _, rest = page.partition(f"\n### {message.__struct_config__.tag}\n")
        assert rest, message
        own = rest.partition("\n### ")[0]
        assert all(f"\n| `{field.encode_name}` | " in own for field in msgspec.structs.fields(message))
    assert "\n| `cursor` | text or null | optional |" in page.partition("### END_OF_HISTORY\n")[2]


def test_every_exit_code_is_in_the_reference() -> None:
    """A program that runs a command acts by its exit code, and no release changes one."""
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", generator().commands_page(), re.MULTILINE)
    table = {int(code): meanings for code, *meanings in rows}
    for column, codes in enumerate(
        (
            {getattr(exit_codes, name) for name in exit_codes.__all__} | {130, 143},
            {0, 1, output.USAGE, 3, 130, streams.BROKEN_PIPE},
            {0, *map(exit_code, (ValueError(), UsageError(""), LogUnavailable(""), KeyboardInterrupt()))}
            | {143},
        )
    ):
        assert {code for code, meanings in table.items() if meanings[column] != "–"} == codes
