"""`strata context`: names for a relay, an identity and pins, so that commands need not repeat them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.tools.cli.options import CONTEXT_SETTINGS, JsonOption, YesOption, expanded

if TYPE_CHECKING:
    from strata.tools.cli.context_file import ContextFile

__all__ = ["app"]

app = typer.Typer(
    name="context",
    help="Save relays and identities under names.\n\n"
    "A command takes its relay, identity and pins from the first of these that gives them: the option, the "
    "context of --context, the environment (STRATA_RELAY, STRATA_IDENTITY, STRATA_PINS), the context named "
    "by STRATA_CONTEXT, the context in use, the default. STRATA_IDENTITY is for commands that sign: "
    "those that read take no identity from the environment.",
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the context.")]


@app.command()
def add(
    name: NameArgument,
    relay: Annotated[
        str, typer.Option("--relay", metavar="URL", help="The relay: a ws or wss URL, or a strata:// URI.")
    ],
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="FILE", help="The key file to use with it.")
    ] = None,
    pins: Annotated[
        Path | None, typer.Option("--pins", metavar="FILE", help="The file of pins to use with it.")
    ] = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Save a context under a new name.

    A context names the key file and never holds the key.
    """
    from strata.tools.cli import output
    from strata.tools.cli.context_file import ContextFile, SavedContext
    from strata.tools.cli.target import relay_url

    url = relay_url(relay, yes=yes)
    context = SavedContext(relay=url, identity=_absolute(identity), pins=_absolute(pins))
    with ContextFile.changed_or_exit() as file:
        try:
            file.add(name, context)
        except ValueError as error:
            output.misuse(error)
    _print(file, name, as_json=json)
    if context.identity is not None and not Path(context.identity).exists():
        output.note(f"there is no key file yet; make one with: strata keygen --output {context.identity}")
    if file.current is None:
        output.note(f"next: strata context use {name}")


@app.command("list")
def list_contexts(json: JsonOption = False) -> None:
    """Show all contexts; a star marks the one in use."""
    from strata.tools.cli import output
    from strata.tools.cli.context_file import ContextFile

    file = ContextFile.read_or_exit()
    if not file.contexts and not json:
        output.note("there are no contexts yet; save one with: strata context add NAME --relay URL")
    width = max(map(len, file.contexts), default=0)
    for name, context in sorted(file.contexts.items()):
        if json:
            _print(file, name, as_json=True)
        else:
            mark = "*" if name == file.current else " "
            output.write_line(output.harmless(f"{mark} {name:<{width}}  {context.relay}"))


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The name; by default the context in use.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show one context."""
    from strata.tools.cli import output
    from strata.tools.cli.context_file import ContextFile

    file = ContextFile.read_or_exit()
    name = name or file.current
    if name is None:
        output.fail("no context is in use; put one in use with: strata context use NAME")
    file.find(name)
    _print(file, name, as_json=json)


@app.command()
def use(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The name; without it, no context is in use.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Put a context in use.

    Commands take their relay, identity and pins from it when nothing else gives them.
    """
    from strata.tools.cli import output
    from strata.tools.cli.context_file import ContextFile

    with ContextFile.changed_or_exit() as file:
        if name is not None:
            file.find(name)
        file.use(name)
    if name is not None:
        _print(file, name, as_json=json)
    elif json:
        output.write_record({"name": None, "current": False})
    else:
        output.write_line("no context is in use")


@app.command()
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The contexts to remove.")],
    json: JsonOption = False,
) -> None:
    """Remove contexts.

    Key files and pins stay where they are.
    """
    from strata.tools.cli import output
    from strata.tools.cli.context_file import ContextFile

    names = list(dict.fromkeys(names))
    with ContextFile.changed_or_exit() as file:
        for name in names:
            file.find(name)
        for name in names:
            file.remove(name)
    for name in names:
        if json:
            output.write_record({"name": name, "removed": True})
        else:
            output.write_line(f"removed: {name}")


def _absolute(path: Path | None) -> str | None:
    """An absolute path, since a context is used from any folder."""
    return None if path is None else str(expanded(path).absolute())


def _print(file: ContextFile, name: str, *, as_json: bool) -> None:
    from strata.tools.cli import output

    context = file.contexts[name]
    record = {
        "name": name,
        "current": name == file.current,
        "relay": context.relay,
        "identity": context.identity,
        "pins": context.pins,
    }
    if as_json:
        output.write_record(record)
        return
    for label, value in record.items():
        shown = ("yes" if value else "no") if isinstance(value, bool) else value or "-"
        output.write_line(output.harmless(f"{label:<9} {shown}"))
