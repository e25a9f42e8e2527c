"""The reference page and the sample file are generated from the settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

from relayd.config import Settings, load, setting_table
from relayd.manual import sample_file, settings_page, toml_value
from tests.relayd.settings_files import as_tuple

ROOT = Path(__file__).parents[2]


def test_the_reference_page_and_the_sample_file_are_in_step():
    assert (ROOT / "docs" / "reference" / "settings.md").read_text() == settings_page(), "run `make docs`"
    assert (ROOT / "deploy" / "relayd.toml").read_text() == sample_file(), "run `make docs`"


def test_the_sample_file_states_the_defaults(toml):
    lines = [line.removeprefix("# ") for line in sample_file().splitlines() if " = " in line]
    sample = tomllib.loads("\n".join(lines))
    assert sample.keys() == setting_table().keys()
    kept = {name: value for name, value in sample.items() if value != ""}
    assert (
        load(toml("\n".join(f"{name} = {toml_value(as_tuple(value))}" for name, value in kept.items())))
        == Settings()
    )
