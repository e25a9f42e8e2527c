"""Make the reference pages from the code: settings, commands, metrics, messages, errors, decisions.

`python scripts/reference.py` writes them; tests/docs/test_reference.py fails when one is out of date.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import strata.tools.cli
import strata_pipeline.cli
import typer
from strata.protocol import errors, wire
from strata.protocol.programs import commands_of

import relayd.cli
from relayd import manual

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = ROOT / "docs" / "decisions"

_COMMANDS_HEAD = """# Command lines

<!-- Made from the programs by `make docs`; edit the help texts there. -->

Every command explains itself with `--help`. The brackets after an option's meaning hold its environment
variable, its default and its range.

| exit code | relayd | strata | strata-pipeline |
|---|---|---|---|
| 0 | done; `serve` has stopped cleanly | done | done, and everything holds |
| 1 | done, but for what the output names | refused, away, not found | a fault was found, or it cannot go on |
| 2 | wrong usage or settings | wrong usage | wrong usage |
| 3 | the database is away, unsafe or in use | `conformance`: no relay answers | the database is away |
| 4 | the port is taken | – | – |
| 130 | stopped by Ctrl-C | stopped by Ctrl-C | stopped by Ctrl-C |
| 141 | – | the reader of stdout went away | – |
| 143 | stopped by SIGTERM; `serve` ends with 0 | – | stopped by SIGTERM |
"""

_WIRE_HEAD = """# Wire messages

<!-- Made from client/strata/protocol/wire.py by `make docs`; edit there. -->

Each WebSocket text frame between a client and a relay holds one JSON object. Its member `type` names the
message. A receiver ignores members that it does not know, and `null` means the same as an absent member. Ids
such as `R-136` and `A-047` name rules: those with R are in [requirements/relay.md](../requirements/relay.md),
those with A in [requirements/ambiguities.md](../requirements/ambiguities.md).
"""

_ERRORS_HEAD = """# Errors

<!-- Made from client/strata/protocol/errors.py by `make docs`; edit there. -->
"""

_METRICS_HEAD = """# Metrics of relayd

<!-- Made from relayd/metrics.py by `make docs`; edit the descriptions there. -->

`/metrics` on the relay's port, or on `metrics_listen`, serves these in Prometheus' format. With `workers`
they cover all workers of the machine. Histograms have the series `…_bucket`, `…_sum` and `…_count`. The
Prometheus client adds `process_…`: CPU time, memory and open files. `deploy/prometheus` has alerts on these
metrics, `deploy/grafana` dashboards, and the [guide](../guides/operations.md) says what to watch. The
[pipeline](../guides/pipeline.md#what-to-watch) and [Tx and Rx](../guides/tx-rx.md) have metrics of their own.

| name | kind | labels | meaning |
|---|---|---|---|
"""

_DECISIONS_HEAD = """# Decisions

<!-- Made from the titles of the notes by `make docs`. -->

Each note is half a page: the context, the choice and its consequences. A later note may supersede an earlier
one; no note is rewritten. Numbers that are missing were given to notes that never came into use.
"""


def pages() -> dict[Path, str]:
    """Every generated file, with the text that it should have."""
    reference = ROOT / "docs" / "reference"
    return {
        reference / "settings.md": manual.settings_page(),
        ROOT / "deploy" / "relayd.toml": manual.sample_file(),
        reference / "command-lines.md": commands_page(),
        reference / "metrics.md": metrics_page(),
        reference / "wire.md": wire_page(),
        reference / "errors.md": errors_page(),
        DECISIONS / "README.md": decisions_page(),
    }


def commands_page() -> str:
    """The text of docs/reference/command-lines.md."""
    lines = [_COMMANDS_HEAD]
    for program, app in (
        ("relayd", relayd.cli.app),
        ("strata", strata.tools.cli.app),
        ("strata-pipeline", strata_pipeline.cli.app),
    ):
        lines += _command(commands_of(app), program, None, level=2)
    return "\n".join(lines)


def _command(command: Any, name: str, parent: Any, level: int) -> Iterator[str]:
    context = typer.Context(command, info_name=name, parent=parent)
    usage = [context.command_path, *command.collect_usage_pieces(context)]
    yield f"{'#' * level} {context.command_path}\n"
    yield inspect.cleandoc(command.help or "").replace("\f", "") + "\n"
    yield f"```text\n{' '.join(usage)}\n```\n"
    records = [
        record
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and (record := parameter.get_help_record(context))
    ]
    if records:
        yield "| argument or option | meaning |\n|---|---|"
        yield from (f"| {_code(names)} | {_cell(meaning)} |" for names, meaning in records)
        yield ""
    for child, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            yield from _command(subcommand, child, context, min(level + 1, 4))


def metrics_page() -> str:
    """The text of docs/reference/metrics.md."""
    tree = ast.parse((ROOT / "relayd" / "metrics.py").read_text(encoding="utf-8"))
    return _METRICS_HEAD + "\n".join([*sorted(filter(None, map(_metric, ast.walk(tree)))), ""])


def _metric(node: ast.AST) -> str | None:
    """The row of a metric, if the node creates one: `Gauge("relayd_…", "meaning", ["label"], …)`."""
    match node:
        case ast.Call(func=ast.Name(id=maker), args=args):
            name, meaning, *more = [*_strings(args), "", ""]
            if not name.startswith("relayd_"):
                return None
        case _:
            return None
    # `Counters` take the name of their only label; a gauge's next string says how workers are combined.
    labels = more[:1] if maker == "Counters" else []
    labels += itertools.chain(*(_strings(each.elts) for each in args if isinstance(each, ast.List)))
    kind = maker.strip("_").lower()
    kind = next(each for each in ("counter", "gauge", "histogram") if each in kind)
    return f"| `{name}` | {kind} | {', '.join(map(_code, labels)) or '–'} | {_cell(meaning)} |"


def _strings(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def wire_page() -> str:
    """The text of docs/reference/wire.md."""
    lines = [_WIRE_HEAD, "## From client to relay\n"]
    lines += _messages(get_args(wire.ClientMessage))
    lines += ["## From relay to client\n"]
    lines += _messages((*get_args(wire.RelayMessage), wire.Moderated, wire.Reconciled))
    lines += [
        "## Parts\n",
        *_struct(wire.Filters, "filters"),
        "## Limits\n",
        "| name | value | meaning |\n|---|---|---|",
    ]
    for name, meaning in _documented_constants(wire):
        value = getattr(wire, name)
        shown = ", ".join(f"`{item}`" for item in value) if isinstance(value, tuple) else f"`{value}`"
        lines.append(f"| `{name}` | {shown} | {_cell(meaning)} |")
    return "\n".join([*lines, ""])


def _messages(structs: tuple[Any, ...]) -> Iterator[str]:
    for struct in structs:
        yield from _struct(struct, str(struct.__struct_config__.tag))


def _struct(struct: Any, title: str) -> Iterator[str]:
    yield f"### {title}\n"
    yield inspect.cleandoc(struct.__doc__) + "\n"
    yield "| member | type | |\n|---|---|---|"
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        presence = "required" if field.required else "optional"
        # Absence and null differ where neither is the default, which msgspec reports as having none.
        or_null = " or null" if not field.required and field.default is msgspec.NODEFAULT else ""
        yield f"| `{field.encode_name}` | {_type(field.type)}{or_null} | {presence} |"
    yield ""


def _type(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.UnionType():
            kinds = [_type(kind) for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType)]
            if kinds == ["integer", "number"]:
                kinds = ["number"]
            return " or ".join(kinds)
        case msgspec.inspect.IntType():
            return "integer" + _range(info)
        case msgspec.inspect.FloatType():
            return "number"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType():
            return " or ".join(f'`"{value}"`' for value in info.values)
        case msgspec.inspect.ListType():
            return f"list of {_type(info.item_type)}"
        case msgspec.inspect.DictType():
            return "object"
        case msgspec.inspect.StructType():
            return f"[{info.cls.__name__.lower()}](#{info.cls.__name__.lower()})"
        case msgspec.inspect.RawType():
            return "packet (object)"
    return "text"


def _range(info: msgspec.inspect.IntType) -> str:
    bounds = [f"≥ {_power(info.ge)}"] if info.ge is not None else []
    bounds += [f"≤ {_power(info.le)}"] if info.le is not None else []
    return f" {', '.join(bounds)}" if bounds else ""


def _power(number: float) -> str:
    return {2**53 - 1: "2⁵³ − 1", 1 - 2**53: "−(2⁵³ − 1)"}.get(int(number), str(number))


def errors_page() -> str:
    """The text of docs/reference/errors.md."""
    advice = dict(_documented_members(errors.Retry))
    lines = [_ERRORS_HEAD, "## Codes\n"]
    lines += ["An ERROR message carries one of these codes. The last column says what a client may do.\n"]
    lines += ["| code | retry | what to do |\n|---|---|---|"]
    lines += [
        f"| `{code}` | {code.retry.value} | {_cell(advice[code.retry.name])} |" for code in errors.ErrorCode
    ]
    tree = re.findall(r"(?:^    .*\n|^\n)+", inspect.cleandoc(errors.__doc__ or "") + "\n", re.MULTILINE)
    drawn = max(tree, key=len).strip("\n")
    lines += ["\n## Exceptions\n", "Every exception that the library raises on purpose is a `StrataError`.\n"]
    lines += [f"```text\n{inspect.cleandoc(drawn)}\n```\n"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        if inspect.isclass(kind) and issubclass(kind, Exception):
            lines += [f"### {name}\n", inspect.cleandoc(kind.__doc__ or "") + "\n"]
    return "\n".join(lines)


def decisions_page() -> str:
    """The text of docs/decisions/README.md: the list of the notes."""
    notes = sorted(path for path in DECISIONS.glob("[0-9]*.md"))
    titles = [(path.name, path.read_text(encoding="utf-8").partition("\n")[0]) for path in notes]
    return "\n".join([_DECISIONS_HEAD, *(f"- [{title.lstrip('# ')}]({name})" for name, title in titles), ""])


def _documented_constants(module: Any) -> Iterator[tuple[str, str]]:
    return _docstrings_below(ast.parse(inspect.getsource(module)).body, str.isupper)


def _documented_members(kind: type) -> Iterator[tuple[str, str]]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return _docstrings_below(tree.body, str.isupper)


def _docstrings_below(body: list[ast.stmt], wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Each assigned name, with the string below its assignment."""
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if wanted(name.replace("_", "")):
                yield name, inspect.cleandoc(text)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("<=", " ≤ ").replace(">=", " ≥ ")
    return plain.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
