"""Make docs/images/terminal.svg: a shell session with a real relay, as it was printed.

`python scripts/terminal_picture.py` runs the commands below in an empty folder and draws their output.
It needs port 7447.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100

COMMANDS = """\
relayd serve 2>relay.log &
strata publish --text "hello relay"
seq 1 1000 | strata publish --stdin | tail -1        # the id of the last one
kill -9 %1                                    # no warning, no clean shutdown
relayd serve 2>>relay.log &
strata subscribe --no-live | head -2
strata subscribe --no-live --json | wc -l     # nothing acknowledged was lost
"""

# One shell prints and runs every command. The lines that are not shown make a key, wait, and clean up.
SESSION = """
set -m
strata keygen >/dev/null 2>&1
trap 'kill %% 2>/dev/null; wait' EXIT
shown() { sleep 0.2; printf '\\n$ %s\\n' "$1"; eval "$1"; }
ready() { until curl -sf 127.0.0.1:7447/readyz >/dev/null; do sleep 0.1; done; sleep 0.5; }
while IFS= read -r -u 3 line; do
  shown "$line" </dev/null
  case "$line" in relayd*) ready ;; kill*) wait %1 ;; esac
done 3<<< "$COMMANDS" 2>/dev/null
"""


def session() -> str:
    """Run the commands; return the session, with each command before its output."""
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        environment = {
            **os.environ,
            "HOME": folder,
            "COMMANDS": COMMANDS.strip(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "--norc", "-c", SESSION],
            cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True,
        )  # fmt: skip
    return done.stdout.strip()


def picture(text: str) -> str:
    """The session as a self-contained SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in text.splitlines():
        command = line.startswith("$ ")
        console.print(
            Text(line, style="bold bright_white" if command else "bright_black" if "{" in line else "")
        )
    drawn = console.export_svg(title="strata", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "terminal.svg").write_text(picture(session()), encoding="utf-8")
