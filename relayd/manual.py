"""The reference page and the sample file of the settings, generated from the settings themselves.

`python -m relayd.manual` writes both into the source tree; a test fails if they are out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from relayd.config import Setting, setting_table

__all__ = ["describe_type", "sample_file", "settings_page", "toml_value"]

_PAGE_HEAD = """# Settings

<!-- Made from relayd/config/settings.py by `make docs`; edit there. -->

Each setting is a key of the TOML file named by `--config` (or `RELAYD_CONFIG`), and a variable of the
environment. A value comes from the first of: command line, environment, file, default. Lists are
comma-separated in the environment. For the settings marked *secret*, `<VARIABLE>_FILE` names a file that
holds the value. An unknown key or variable stops the relay with an error that names the nearest valid one;
`relayd check-config` shows what is in effect and `relayd doctor` whether it works here. A folder may
stand for the file: then `config.toml` in it is read if it is there, and any other `.toml` in it is an error.

*SIGHUP* in the last column means that the relay takes over a changed value when it receives that signal; all
other settings need a restart, and so does switching TLS on or off. On SIGHUP the relay reads the settings
file, the files of secrets and the certificates again. It checks everything first: one fault, and nothing
changes. The log names the settings that changed (`reloaded`) and those that wait for a restart
(`restart_needed`). The environment and the command line of a running process do not change.
"""

_SAMPLE_HEAD = """# Settings of relayd, all at their defaults. Uncomment what you change.
# The reference is docs/reference/settings.md; `relayd check-config --config FILE` checks a file.
# Made from relayd/config/settings.py by `make docs`; a test keeps it in step.
"""


def settings_page() -> str:
    """The text of docs/reference/settings.md."""
    lines = [_PAGE_HEAD, "| key | variable | type | unit | default | meaning | change |", "|" + "---|" * 7]
    for row in setting_table().values():
        doc = f"{row.doc} *Secret.*" if row.secret else row.doc
        default = "–" if row.default is None else f"`{toml_value(row.default)}`"
        change = "SIGHUP" if row.reload else "restart"
        kind = describe_type(row.type).replace("|", "\\|")
        lines.append(
            f"| `{row.name}` | `{row.variable}` | {kind} | {row.unit or '–'} | {default} | {doc} | {change} |"
        )
    lines += ["", "The largest frame read is not a setting: it is 2 × `max_packet_bytes` + 65536 bytes.", ""]
    return "\n".join(lines)


def sample_file() -> str:
    """The text of deploy/relayd.toml."""
    return _SAMPLE_HEAD + "".join(_sample_entry(row) for row in setting_table().values())


def describe_type(type_: object) -> str:
    """A setting's type and range in words."""
    info = msgspec.inspect.type_info(type_)
    if isinstance(info, msgspec.inspect.UnionType):
        info = next(kind for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType))
    match info:
        case msgspec.inspect.IntType():
            return "integer" + _range(info)
        case msgspec.inspect.FloatType():
            return "number" + _range(info)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in info.values)
        case msgspec.inspect.VarTupleType():
            return "list of text"
        case msgspec.inspect.CustomType():
            return "path"
    return "text"


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    match value:
        case None:
            return '""'
        case tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
    return json.dumps(str(value), ensure_ascii=False)


def _range(info: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    low = f" > {info.gt:g}" if info.gt is not None else f" ≥ {info.ge}" if info.ge is not None else ""
    high = f"{',' if low else ''} ≤ {_plain(info.le)}" if info.le is not None else ""
    return low + high


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _sample_entry(row: Setting) -> str:
    notes = [describe_type(row.type).replace("`", "")]
    notes += [row.unit] if row.unit else []
    notes += ["secret: rather set " + row.variable + "_FILE"] if row.secret else []
    notes += ["SIGHUP"] if row.reload else []
    return f"\n# {row.doc.replace('`', '')} ({'; '.join(notes)})\n# {row.name} = {toml_value(row.default)}\n"


def _write(root: Path) -> None:
    (root / "docs" / "reference" / "settings.md").write_text(settings_page(), encoding="utf-8")
    (root / "deploy" / "relayd.toml").write_text(sample_file(), encoding="utf-8")


if __name__ == "__main__":
    _write(Path(__file__).parents[1])
