"""A page of the documentation as a script: its commands run unchanged, in the page's order.

A test names the commands one by one, by their first words, and maps words of the page's examples to the
test's own. A command that the page has and the test does not name fails the test, and so does a mapped word
that does not occur.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from tests.support.forks import RELAYD, STRATA, ForkedProcess
from tests.support.relay_process import ROOT

__all__ = ["Guide", "blocks"]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\s#.*")
_FOR_A_SHELL = re.compile(r"[|<>$&;`*]|^\w+=")
_PROGRAMS = {"relayd": RELAYD, "strata": STRATA}
_TIMEOUT = 60.0


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: (language, text)."""
    return [(match[2], re.sub(f"^{match[1]}", "", match[3], flags=re.M)) for match in _FENCE.finditer(text)]


class Guide:
    """One page. `words` maps words of the page to the test's replacements.

    `elsewhere` names, by their first words, commands and blocks that cannot run here or that another test
    runs, each with the reason.
    """

    def __init__(
        self,
        page: str,
        folder: Path,
        environment: Mapping[str, str],
        *,
        words: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self._page = page
        self._folder = folder
        self._environment: dict[str, str] = {}
        self.speak_as(environment)
        self._words = dict(words or {})
        self._unused = set(self._words)
        self._elsewhere = dict(elsewhere or {})
        self._unmet = set(self._elsewhere)
        self._steps = deque(_steps((ROOT / page).read_text(encoding="utf-8")))

    def speak_as(self, environment: Mapping[str, str]) -> None:
        """Use this environment for commands from now on."""
        self._environment = {
            **environment,
            "HOME": str(self._folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(
        self, beginning: str, words: Mapping[str, str] | None = None, *, exit_code: int = 0, stdin: str = ""
    ) -> str:
        """Run the next command, which must begin so; return its output, compared with that on the page."""
        command, shown = self._next("sh", beginning)
        code, out, err = self._execute(self._in_our_words(command, words), stdin)
        assert code == exit_code, f"{command}\n{err}"
        assert "Traceback" not in err, err
        if shown is not None:
            assert _looks_like(self._in_our_words(shown, words, may_leave_out=True), out), (
                f"{self._page}, {command}: the page shows\n{shown}\nand it prints\n{out}"
            )
        return out

    def block(self, language: str, beginning: str, words: Mapping[str, str] | None = None) -> str:
        """The next block, which must be of this language and begin so, with our words."""
        return self._in_our_words(self._next(language, beginning)[0], words)

    def finish(self) -> None:
        """Check that nothing of the page is left, and that all words and blocks of the test occurred."""
        self._pass_by()
        assert not self._steps, f"{self._page}: nobody runs: {self._steps[0][1]}"
        assert not self._unused, f"{self._page} does not say {self._unused}"
        assert not self._unmet, f"{self._page} has no block that begins so: {self._unmet}"

    def _next(self, language: str, beginning: str) -> tuple[str, str | None]:
        self._pass_by()
        assert self._steps, f"{self._page} ends before: {beginning}"
        found, text, shown = self._steps.popleft()
        assert found == language and text.startswith(beginning), (
            f"{self._page}: next comes this, and not `{beginning}`:\n{text}"
        )
        return text, shown

    def _pass_by(self) -> None:
        while self._steps:
            met = {each for each in self._elsewhere if self._steps[0][1].startswith(each)}
            if not met:
                return
            self._unmet -= met
            self._steps.popleft()

    def _in_our_words(
        self, text: str, words: Mapping[str, str] | None, *, may_leave_out: bool = False
    ) -> str:
        for said, ours in {**self._words, **(words or {})}.items():
            if said in text:
                self._unused.discard(said)
                text = text.replace(said, ours)
        assert may_leave_out or "…" not in text.partition("  #")[0], (
            f"{self._page} leaves something out: {text}"
        )
        return text

    def _execute(self, command: str, stdin: str) -> tuple[int, str, str]:
        arguments = shlex.split(command, comments=True)
        if arguments[0] == "export":
            self._environment.update(dict(each.split("=", 1) for each in arguments[1:]))
            return 0, "", ""
        if arguments[0] in _PROGRAMS and not _FOR_A_SHELL.search(_QUOTED.sub("", command)):
            program = _PROGRAMS[arguments[0]]
            environment = {name: text for name, text in self._environment.items() if name != "PATH"}
            process = ForkedProcess(
                program, arguments[1:], env=environment, cwd=self._folder, stdin=subprocess.PIPE
            )
            out, err = process.communicate(stdin.encode(), _TIMEOUT)
            assert process.returncode is not None
            return process.returncode, out.decode(), err.decode()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._folder, env=self._environment, input=stdin, capture_output=True, text=True,
            timeout=_TIMEOUT, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


def _steps(text: str) -> list[tuple[str, str, str | None]]:
    """Each command, and each block of another language: (language, text, the output that the page shows)."""
    steps: list[tuple[str, str, str | None]] = []
    for language, block in blocks(text):
        if language == "sh":
            lines = block.replace("\\\n", " ").splitlines()
            steps += [("sh", line.strip(), None) for line in lines if line.strip() and line[0] != "#"]
        elif language == "text" and steps and steps[-1][0] == "sh":
            steps[-1] = (*steps[-1][:2], block)
        else:
            steps.append((language, block.strip(), None))
    return steps


def _looks_like(shown: str, printed: str) -> bool:
    """Whether this was printed, ignoring spaces; `…` stands for anything within a line."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    wanted = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    patterns = [".*".join(map(re.escape, line.split("…"))) for line in wanted]
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)
