"""A soak of seconds on a real relay: clients leave in every way, and nothing of theirs remains."""

from __future__ import annotations

import json

from benches.__main__ import main
from benches.churn import LEAVES


def test_clients_come_and_go_and_nothing_is_left_behind(capsys):
    assert main(["soak", "--brief", "--json", "--seed", "3"]) == 0
    measures = {each["name"]: each for each in json.loads(capsys.readouterr().out)["measures"]}
    left = {name for name in measures if name.endswith("left behind")}
    assert len(left) == 6 and all(measures[name]["met"] for name in left)
    assert {"memory, growth", "files, growth", "tasks, growth"} <= set(measures)
    assert measures["memory, growth"]["target"] is None, "seconds say nothing about growth"
    about = measures["acknowledged and not read"]["details"]
    assert measures["acknowledged and not read"]["value"] == measures["read twice"]["value"] == 0
    assert about["acknowledged"] > 0 and about["reloads"] > 0 and set(about["left"]) <= set(LEAVES)
