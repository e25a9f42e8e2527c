"""Shared parts of all commands: options, errors, exit codes.

0  done, and every check holds
1  the job cannot continue, or a check found a fault
2  usage
3  the database cannot be reached
130 and 143 stopped by Ctrl-C, by SIGTERM
141 the reader of stdout went away
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from strata.protocol.programs import run_program
from strata.protocol.sentences import sentence
from strata.protocol.sequences import parse_day

from strata_pipeline.errors import LogUnavailable, PipelineError, UsageError
from strata_pipeline.lake.stores.schemes import is_object_place, not_on_a_disk
from strata_pipeline.lake_format import LakeError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "LONGEST_GRACE",
    "BootstrapFile",
    "Json",
    "LakeFolder",
    "LakePlace",
    "Master",
    "SparkConf",
    "Url",
    "app",
    "day_given",
    "exit_code",
    "failures_told",
    "main",
    "named",
    "reachable",
    "say",
    "session_on",
    "spark_conf",
]

app = typer.Typer(
    name="strata-pipeline",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="STRATA_PIPELINE_DATABASE_URL",
        metavar="URL",
        help="The relay's PostgreSQL; a replica, and a role that may only read, are enough.",
        show_default=False,
        show_envvar=True,
    ),
]
BootstrapFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The relay's bootstrap file, if it has one: the keys it trusts."),
]


def named(place: str | None) -> str | None:
    """A place with a name; None if the option was left out. Raises `typer.BadParameter`.

    An empty name comes from a script's variable that was never set, and the system takes it for the current
    folder.
    """
    if place == "":
        raise typer.BadParameter("it is empty, and names no place: the folder you are in is .")
    return place


def _on_a_disk(place: str) -> str:
    named(place)
    if is_object_place(place):
        raise typer.BadParameter(not_on_a_disk(place))
    return place


def reachable(place: str) -> str:
    """A place for a lake; if it is in a bucket, it is well-formed. Raises `typer.BadParameter`."""
    named(place)
    if is_object_place(place):
        from strata_pipeline.lake.stores.objects import ObjectStore

        try:
            ObjectStore.at(place)
        except UsageError as error:
            raise typer.BadParameter(str(error)) from None
    return place


LakeFolder = Annotated[
    str,
    typer.Option(
        "--lake", metavar="DIR", help="The folder of the lake.", show_default=False, callback=_on_a_disk
    ),
]
LakePlace = Annotated[
    str,
    typer.Option(
        "--lake",
        metavar="PLACE",
        help="The lake: a folder, or s3://bucket/prefix on an object store.",
        show_default=False,
        callback=reachable,
    ),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Where Spark runs: local[*], spark://host:7077 or sc://host:15002, for example.",
    ),
]
SparkConf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; may repeat."),
]
LONGEST_GRACE = 10**10
"""In seconds, about three hundred years: Python's own times can still differ by this much."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines, for programs.")]


def _print_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(metadata.version("strata-pipeline"))
        except metadata.PackageNotFoundError:  # running from a source tree that was never installed
            typer.echo("0+unknown")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """The relay's log on Spark: archive it, audit it, report on it, restore from it."""


def spark_conf(pairs: list[str] | None) -> dict[str, str]:
    """`--conf key=value` as a mapping. Raises `UsageError`."""
    settings = {}
    for pair in pairs or []:
        key, separator, value = pair.partition("=")
        if not separator:
            raise UsageError(f"--conf {pair}: KEY=VALUE is needed")
        settings[key.strip()] = value
    return settings


@contextmanager
def session_on(lake: str, name: str, master: str | None, conf: list[str] | None) -> Iterator[SparkSession]:
    """A Spark session for a job on the lake at this place.

    A lake that is not there is told before Spark starts, which takes seconds. Raises `LakeError`, and what
    `open_session` raises.
    """
    from strata_pipeline.lake.places import require_lake
    from strata_pipeline.session import open_session

    settings = spark_conf(conf)
    require_lake(lake)
    with open_session(name, master=master, conf=settings) as spark:
        yield spark


def say(text: str, as_json: bool, **members: object) -> None:
    """Print a result: the text, or the members as JSON."""
    print(json.dumps(members) if as_json else text, flush=True)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a job at once."""


def exit_code(error: BaseException) -> int:
    """The exit code of the program for the exception that has ended it."""
    match error:
        case typer.Exit():
            return error.exit_code
        case UsageError():
            return 2
        case LogUnavailable():
            return 3
        case _Terminated():
            return 128 + signal.SIGTERM
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case _:
            return 1


def day_given(option: str, text: str) -> int:
    """The number of a day that an option names. Raises `UsageError`."""
    try:
        return parse_day(text)
    except ValueError:
        raise UsageError(f"{option} {text}: a day is written 2026-11-21") from None


@contextmanager
def failures_told() -> Iterator[None]:
    """End the program with one line on stderr and an exit code, never with a traceback.

    SIGTERM ends it as Ctrl-C does, unless the command sets its own handler.
    """
    with _terminating():
        try:
            yield
        except (PipelineError, LakeError) as error:
            _end(error, exit_code(error))
        except KeyboardInterrupt as error:
            _end("stopped; run it again to go on", exit_code(error))
        except BrokenPipeError:
            raise  # the reader of our output is gone, so no message is needed
        except OSError as error:
            _end(sentence(error), 1)


@contextmanager
def _terminating() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # py4j logs a page for each call to Java that a signal cuts short.
    logging.getLogger().addFilter(_is_news)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        logging.getLogger().removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


def _end(why: object, code: int) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"strata-pipeline: {why}", markup=False)
    raise typer.Exit(code)


def main() -> None:
    """The entry point of the `strata-pipeline` command."""
    install = "pip install 'strata-pipeline[spark]' (from a checkout: make pipeline)"
    run_program(app, "strata-pipeline", says="strata-pipeline", install=install)
