"""What the command lines of all programs share: how their help looks, and how they begin and end.

A command reports the errors that it expects. What is left for the end of a program is a stdout that takes
nothing more, and a package that is not installed.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command

from strata.protocol.interrupts import EndsAtOnce
from strata.protocol.sentences import sentence
from strata.protocol.streams import BROKEN_PIPE, forget_stdout, open_standard_streams

__all__ = ["commands_of", "run_program"]

_OURS = {"relayd", "strata", "strata_pipeline", "strata_testkit"}


class _NamedArgument(TyperArgument):
    """An argument that help shows by its name alone, `PACKET_ID...`, as it shows the value of an option."""

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return None if record is None else (self._placeholder + self._dots, record[1])

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        return [(self._placeholder if self.required else f"[{self._placeholder}]") + self._dots]

    @property
    def _placeholder(self) -> str:
        return self.metavar or str(self.name).upper()

    @property
    def _dots(self) -> str:
        return "" if self.nargs == 1 else "..."


def commands_of(app: typer.Typer) -> TyperGroup:
    """The commands of a program, as they run and as help shows them."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    _name_arguments(group)
    return group


def _name_arguments(command: Any) -> None:
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            parameter.__class__ = _NamedArgument
    for each in getattr(command, "commands", {}).values():
        _name_arguments(each)


def run_program(app: typer.Typer, name: str, *, says: str, install: str | None = None) -> NoReturn:
    """Run the program that this process was started as, and end the process with its exit code.

    `says` begins its messages. `install` is the command that installs what it needs beyond the library.
    """
    open_standard_streams()
    with EndsAtOnce():
        commands = commands_of(app)
    try:
        commands(prog_name=name)
    except SystemExit as ended:
        # Typer exits with 1 when the reader of stdout has gone away, as for any other error.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        forget_stdout()
        sys.exit(BROKEN_PIPE)
    except OSError as error:  # a full disk behind stdout
        forget_stdout()
        _end(f"{says}: {sentence(error)}", 1)
    except ModuleNotFoundError as error:
        if install is None or (error.name or "").partition(".")[0] in _OURS:
            raise
        # The distribution alone is the client library; what the other programs need are extras.
        _end(f"{says}: {error.name} is not installed; {name} needs: {install}", 2)
    sys.exit(0)


def _end(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)
