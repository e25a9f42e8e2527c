"""`strata relays`: what this machine knows about relays, and how it learns more.

This module defines only the command lines, so that `--help` loads nothing else; `scores` does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.tools.cli.options import CONTEXT_SETTINGS, JsonOption, expanded

__all__ = ["DEFAULT_SCORES", "app"]

DEFAULT_SCORES = Path("~/.local/state/strata/relays.db")

app = typer.Typer(
    name="relays",
    help="Keep a list of relays and how good they are.\n\n"
    "The list stays on this machine and is told to nobody.",
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
)

ScoresOption = Annotated[
    Path,
    typer.Option("--scores", envvar="STRATA_SCORES", metavar="FILE", help="The file that keeps the scores."),
]


@app.command("list")
def show(scores: ScoresOption = DEFAULT_SCORES, json: JsonOption = False) -> None:
    """Show every known relay, the best first."""
    from strata.tools.cli import scores as work

    work.show(expanded(scores), as_json=json)


@app.command()
def probe(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="The relays; by default every known relay.")
    ] = None,
    count: Annotated[
        int,
        typer.Option("--count", "-n", min=1, max=1000, metavar="N", help="Ask each relay this many times."),
    ] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Wait this long for an answer.")
    ] = 5.0,
    scores: ScoresOption = DEFAULT_SCORES,
    json: JsonOption = False,
) -> None:
    """Measure relays, and remember the figures.

    Exit code 1 if one of them could not be reached.
    """
    from strata.tools.cli import scores as work

    work.probe(expanded(scores), tuple(urls or ()), count=count, timeout=timeout, as_json=json)


@app.command()
def add(
    relays: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="The relays: ws, wss or strata:// URLs.")
    ] = None,
    list_file: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="A bootstrap file (JSON): an array of URLs or of relays."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Add the relay of a strata:// URI without asking.")
    ] = False,
    scores: ScoresOption = DEFAULT_SCORES,
    json: JsonOption = False,
) -> None:
    """Add relays to the list."""
    from strata.tools.cli import scores as work

    work.add(expanded(scores), tuple(relays or ()), list_file, yes=yes, as_json=json)


@app.command()
def export(scores: ScoresOption = DEFAULT_SCORES) -> None:
    """Print the probe log of the last 14 days, as JSON lines.

    Each line has url, at (Unix seconds), kind, good, bad and value. The log tells which relays this machine
    uses, and when: give it only to people who may know that.
    """
    import msgspec

    from strata.relays.pool.score_file import ScoreFile
    from strata.tools.cli import output

    try:
        with ScoreFile(expanded(scores)) as file:
            for observation in file.observations(since=0.0):
                output.write_record(msgspec.to_builtins(observation))
    except BrokenPipeError:
        raise  # the reader of stdout has gone away, which is not an error to report
    except OSError as error:
        output.fail(error)


@app.command()
def forget(
    urls: Annotated[list[str], typer.Argument(metavar="URL", help="The relays to forget.")],
    scores: ScoresOption = DEFAULT_SCORES,
    json: JsonOption = False,
) -> None:
    """Forget relays and everything observed of them.

    Exit code 1 if one of them was not known.
    """
    from strata.tools.cli import scores as work

    work.forget(expanded(scores), tuple(urls), as_json=json)
