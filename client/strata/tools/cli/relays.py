"""`strata relays`: what this machine knows about relays, and how to find out more.

Only the command lines are here, so that `--help` loads nothing else; the work is in `scores`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DEFAULT_SCORES", "app"]

DEFAULT_SCORES = Path("~/.local/state/strata/relays.db")

app = typer.Typer(
    name="relays",
    help="Keep a list of relays and what is known about each: local to this machine, told to nobody.",
    no_args_is_help=True,
)

ScoresOption = Annotated[
    Path,
    typer.Option("--scores", envvar="STRATA_SCORES", metavar="FILE", help="The file that keeps the scores."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for programs.")]


@app.command("list")
def show(scores: ScoresOption = DEFAULT_SCORES, json: JsonOption = False) -> None:
    """Show every relay known, best first."""
    from strata.tools.cli import scores as work

    work.show(scores.expanduser(), as_json=json)


@app.command()
def probe(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="These; by default every relay known.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Questions to each.")] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Wait this long for an answer.")
    ] = 5.0,
    scores: ScoresOption = DEFAULT_SCORES,
    json: JsonOption = False,
) -> None:
    """Measure relays, and keep what was seen.

    Exit code 1 if one of them could not be reached.
    """
    from strata.tools.cli import scores as work

    work.probe(scores.expanduser(), tuple(urls or ()), count=count, timeout=timeout, as_json=json)


@app.command()
def add(
    relays: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="ws, wss or strata://relay URLs.")
    ] = None,
    list_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="A bootstrap file: JSON, an array of URLs or more."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take a strata:// URL unasked.")] = False,
    scores: ScoresOption = DEFAULT_SCORES,
    json: JsonOption = False,
) -> None:
    """Make relays known."""
    from strata.tools.cli import scores as work

    work.add(scores.expanduser(), tuple(relays or ()), list_file, yes=yes, as_json=json)


@app.command()
def export(scores: ScoresOption = DEFAULT_SCORES) -> None:
    """Print what was observed of relays, as JSON lines.

    A probe log of the last 14 days: url, at (Unix seconds), kind, good, bad and value. It says which relays
    this machine uses, and when; give it to nobody but those who may know.
    """
    import msgspec

    from strata.relays.pool.score_file import ScoreFile
    from strata.tools.cli import output

    try:
        with ScoreFile(scores.expanduser()) as file:
            for observation in file.observations(since=0.0):
                output.write_record(msgspec.to_builtins(observation))
    except OSError as error:
        output.fail(str(error))


@app.command()
def forget(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="The relays to forget.")],
    scores: ScoresOption = DEFAULT_SCORES,
    json: JsonOption = False,
) -> None:
    """Forget relays and everything observed of them. Exit code 1 if one was not known."""
    from strata.tools.cli import scores as work

    work.forget(scores.expanduser(), tuple(urls), as_json=json)
