"""What importing provenance costs, and what happens when the extra is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import strata

CLIENT = str(Path(strata.__file__).parent.parent)
EXTRA = {"cryptography", "cbor2", "jwt"}
PARTS = ("x509", "evidence.apple", "evidence.play", "evidence.c2pa", "evidence.cbor")


def run(code: str) -> str:
    code = f"import sys; sys.path.insert(0, {CLIENT!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_package_needs_no_extra() -> None:
    loaded = run(
        "import strata.protocol.provenance, strata.protocol.typed, strata.relays.curation;"
        "print(' '.join(sys.modules))"
    )
    assert not EXTRA & set(loaded.split())


def test_what_needs_the_extra_names_it() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in EXTRA)
    tries = "".join(
        f"try: import strata.protocol.provenance.{part}\nexcept ImportError as e: print(e)\n"
        for part in PARTS
    )
    lines = run(blocked + tries).splitlines()
    assert len(lines) == len(PARTS)
    assert all("pip install strata-sdk[provenance]" in line for line in lines)
