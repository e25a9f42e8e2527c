"""Load the settings from their sources.

A value comes from the first of: the command line, the environment (`RELAYD_<KEY>`, or `RELAYD_<KEY>_FILE` for
a secret), the TOML file, the default. An empty variable counts as absent, because compose files pass empty
ones. If a folder is named, the file is the `config.toml` in it and may be missing: a container mounts a
folder that is often empty. `--data-dir` on the command line selects the embedded server, and so overrides a
`database_url` from a lower source.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from strata.protocol.auth import MAX_LIFETIME_SECONDS
from strata.protocol.text_files import utf8_of

from relayd.config.checks import advice, contradictions, unknown
from relayd.config.settings import (
    ENV_PREFIX,
    HARD_MAX_PACKET_BYTES,
    Setting,
    Settings,
    SettingSources,
    setting_table,
)

__all__ = ["ConfigurationError", "Reloaded", "load", "read_only_once", "reloaded"]

# Variables with our prefix that are not settings: the path of the file, and those for tests.
_OTHER_VARIABLES = ("RELAYD_CONFIG", "RELAYD_FAILPOINTS")
_OTHER_PREFIXES = ("RELAYD_TEST_",)

CONFIG_NAME = "config.toml"
"""The name of the settings file in a folder."""


class ConfigurationError(Exception):
    """The settings cannot be used. `problems` has a sentence for every fault found, without secrets."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(*self.problems)

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[tuple[str, ...]]]:
        # A worker pickles it for its parent; by default each problem would become an argument.
        return type(self), (self.problems,)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def load(
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    cli_overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Build the settings; a value of None from the command line counts as not given.

    Reads `config_file` and the files that `_FILE` variables name, nothing else. Raises `ConfigurationError`
    with all problems at once.
    """
    problems: list[str] = []
    given = {name: value for name, value in (cli_overrides or {}).items() if value is not None}
    values = _from_file(config_file, problems)
    from_environment = _from_environment(environ or {}, problems)
    put_aside = [name for name, value in values.items() if from_environment.get(name, value) != value]
    values |= from_environment
    if "data_dir" in given and "database_url" not in given:
        values.pop("database_url", None)
    elif "data_dir" in given:
        problems.append("--database-url and --data-dir exclude each other")
    values |= _convert(given, problems, lambda row: "--" + row.name.replace("_", "-"), lax=False)
    settings = dataclasses.replace(Settings(), **values)
    problems += contradictions(settings)
    if problems:
        raise ConfigurationError(problems)
    ours = {name: text for name, text in (environ or {}).items() if name.startswith(ENV_PREFIX)}
    origin = SettingSources(config_file, ours, given)
    # An operator who changes a line that is overridden would look for the effect in vain.
    ignored = tuple(
        f"{row.name} in {config_file} counts for nothing: the environment has another ({row.variable})"
        for row in map(setting_table().__getitem__, put_aside)
        if row.name not in given
    )
    return _clamped(dataclasses.replace(settings, origin=origin, warnings=ignored + advice(settings, values)))


def _from_file(path: Path | None, problems: list[str]) -> dict[str, Any]:
    try:
        if path is not None and path.is_dir():
            path = _in_folder(path, problems)
        if path is None:
            return {}
        raw = tomllib.loads(utf8_of(path.read_bytes()).decode())
    except (OSError, ValueError, RecursionError) as error:  # also for too long a number, or too deep a list
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        problems.append(f"{path}: {error.strerror if isinstance(error, OSError) else why}")
        return {}
    return _convert(raw, problems, lambda row: f"{path}: {row.name}", lax=False, source=f"{path}: ")


def _in_folder(folder: Path, problems: list[str]) -> Path | None:
    """The settings file in a folder. Another TOML file there would have no effect, so it is a fault.

    Raises `OSError`: a folder that cannot be read does not count as empty.
    """
    found = sorted(path.name for path in folder.iterdir() if path.suffix == ".toml")
    problems += [
        f"{folder / name} is not read: the settings file is {CONFIG_NAME}"
        for name in found
        if name != CONFIG_NAME
    ]
    return folder / CONFIG_NAME if CONFIG_NAME in found else None


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    by_variable = {row.variable: row for row in setting_table().values()}
    valid = {variable + "_FILE" for variable, row in by_variable.items() if row.secret} | set(by_variable)
    texts: dict[str, object] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or not environ[variable]:
            continue
        if variable in _OTHER_VARIABLES or variable.startswith(_OTHER_PREFIXES):
            continue
        if variable not in valid:
            problems.append(unknown("environment variable", variable, valid))
        elif variable in by_variable:
            texts[by_variable[variable].name] = environ[variable]
        else:
            text = _read_secret(variable, environ, problems)
            if text is not None:
                texts[by_variable[variable.removesuffix("_FILE")].name] = text
    return _convert(texts, problems, lambda row: row.variable, lax=True)


def _read_secret(variable: str, environ: Mapping[str, str], problems: list[str]) -> str | None:
    if environ.get(variable.removesuffix("_FILE")):
        problems.append(f"{variable} and {variable.removesuffix('_FILE')} exclude each other")
        return None
    try:
        return utf8_of(Path(environ[variable]).read_bytes()).decode().strip()
    except (OSError, ValueError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        told = error.strerror if isinstance(error, OSError) else why
        problems.append(f"{variable}: cannot read {environ[variable]}: {told}")
        return None


def _convert(
    raw: Mapping[str, object],
    problems: list[str],
    label: Callable[[Setting], str],
    *,
    lax: bool,
    source: str = "",
) -> dict[str, Any]:
    """Convert raw values to their types. `lax` reads numbers, booleans and comma-separated lists in text."""
    table = setting_table()
    values: dict[str, Any] = {}
    for name, value in raw.items():
        row = table.get(name)
        if row is None:
            problems.append(source + unknown("setting", name, table))
            continue
        if lax and row.is_list:
            value = [item.strip() for item in str(value).split(",") if item.strip()]
        try:
            values[name] = msgspec.convert(value, row.type, strict=not lax, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            # msgspec names types and ranges, never the value, so a secret cannot show here.
            problems.append(f"{label(row)}: {_first_lower(str(error))}")
    return values


def _decode_path(type_: type, value: object) -> object:
    if type_ is Path and isinstance(value, str | Path):
        return Path(value)
    raise msgspec.ValidationError(f"Expected `str`, got `{type(value).__name__}`")


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The result of `reloaded`: the settings from now on, and the names of those that changed."""

    settings: Settings
    changed: tuple[str, ...] = ()
    """The settings that take effect."""
    restart_needed: tuple[str, ...] = ()
    """The settings with a new value in their sources, whose old value the running relay keeps."""
    fresh: Settings | None = None
    """The settings that a relay started now would have."""


def reloaded(settings: Settings) -> Reloaded:
    """Read the settings again from their sources, and take over those that SIGHUP may change.

    The command line and the environment of a process cannot change, so they are those at startup. The
    settings file and the files that `_FILE` variables name are read again. Raises `ConfigurationError` for
    any fault, even in settings that need a restart.
    """
    if settings.origin is None:
        return Reloaded(settings)
    file, environ, _ = settings.origin
    secrets = [environ.get(f"{row.variable}_FILE") for row in setting_table().values() if row.secret]
    files = [Path(path) for path in secrets if path]
    files += [] if file is None else [file, file / CONFIG_NAME]
    if problems := [problem for path in files if (problem := read_only_once(path))]:
        raise ConfigurationError(problems)
    fresh = load(*settings.origin)
    differing = [name for name in setting_table() if getattr(fresh, name) != getattr(settings, name)]
    reloadable = {row.name for row in setting_table().values() if row.reload}
    if (fresh.tls_cert is None) is not (settings.tls_cert is None):
        reloadable -= {"tls_cert", "tls_key"}  # a listening socket speaks TLS from the start, or never
    changed = tuple(name for name in differing if name in reloadable)
    values = {name: getattr(fresh, name) for name in changed}
    return Reloaded(
        dataclasses.replace(settings, **values, warnings=fresh.warnings),
        changed=changed,
        restart_needed=tuple(name for name in differing if name not in reloadable),
        fresh=fresh,
    )


def read_only_once(path: Path) -> str | None:
    """The reason why a running relay cannot read this file again; None if it can, or if nothing is there.

    A pipe gives its text only once: then it seems to be empty, or keeps the reader waiting.
    """
    try:
        if not path.exists() or path.is_file() or path.is_dir() or path.samefile(os.devnull):
            return None
    except OSError:  # reading it tells why
        return None
    return f"{path}: not a regular file, so it cannot be read again: use a regular file, or restart the relay"


def _clamped(settings: Settings) -> Settings:
    """Lower values that are too large to the largest usable value, with a warning for each (R-119, R-272)."""
    changed: dict[str, Any] = {}
    warnings = list(settings.warnings)
    for name, most, what in (
        ("max_packet_bytes", HARD_MAX_PACKET_BYTES, "the hard limit"),
        ("challenge_lifetime", MAX_LIFETIME_SECONDS, "what clients accept"),
    ):
        value = getattr(settings, name)
        if value > most:
            changed[name] = most
            warnings.append(f"{name} {value} is above {what}; using {most}")
    return dataclasses.replace(settings, **changed, warnings=tuple(warnings))


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]
