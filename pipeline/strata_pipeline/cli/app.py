"""What all commands share: options, errors, exit codes.

0  done, and where something was checked, all of it holds
1  the job cannot go on, or what was checked does not hold
2  usage
3  the database cannot be reached
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from strata.protocol.lake import LakeError

from strata_pipeline.errors import LogUnavailable, PipelineError, UsageError

__all__ = [
    "Json",
    "LakeFolder",
    "Master",
    "SparkConf",
    "Url",
    "app",
    "failures_told",
    "main",
    "say",
    "spark_conf",
]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Url = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="STRATA_PIPELINE_DATABASE_URL",
        help="PostgreSQL of the relay; a replica and a role that may only read will do.",
        show_default=False,
        show_envvar=True,
    ),
]
LakeFolder = Annotated[
    str, typer.Option("--lake", metavar="DIR", help="The lake's folder.", show_default=False)
]
Master = Annotated[
    str | None, typer.Option("--master", help="Where Spark runs: local[*], spark://host:7077, …")
]
SparkConf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; may be given several times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON, a line each.")]


@app.callback()
def _options() -> None:
    """The relay's log on Spark: archive it, audit it, ask it, restore from it."""


def spark_conf(pairs: list[str] | None) -> dict[str, str]:
    """`--conf key=value` as a mapping. Raises `UsageError`."""
    settings = {}
    for pair in pairs or []:
        key, separator, value = pair.partition("=")
        if not separator:
            raise UsageError(f"--conf {pair}: KEY=VALUE is needed")
        settings[key.strip()] = value
    return settings


def say(text: str, as_json: bool, **members: Any) -> None:
    """Print a result: the text, or the members as JSON."""
    print(json.dumps(members) if as_json else text, flush=True)


@contextmanager
def failures_told() -> Iterator[None]:
    """End the program with a line on stderr and an exit code, instead of a traceback."""
    try:
        yield
    except UsageError as error:
        _end(error, 2)
    except LogUnavailable as error:
        _end(error, 3)
    except (PipelineError, LakeError) as error:
        _end(error, 1)
    except KeyboardInterrupt:
        _end("stopped; run it again to go on", 130)


def _end(why: object, code: int) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"strata-pipeline: {why}", markup=False)
    raise typer.Exit(code)


def main() -> None:
    """The program."""
    app(prog_name="strata-pipeline")
    sys.exit(0)
