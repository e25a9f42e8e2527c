"""The error tree, and the table of wire codes against the requirement rows."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
import re
from typing import NamedTuple

import pytest
import strata
from strata.protocol import errors
from strata.protocol.errors import ErrorCode, Retry, retry_advice

# relay.md §12, written out: a code that is missing or spelled differently breaks every peer.
RFC_0004 = {
    "invalid_signature",
    "invalid_schema",
    "packet_too_large",
    "rate_limited",
    "blocked_author",
    "unauthenticated",
    "internal_error",
    "invalid_provenance",
    "missing_proof",
    "invalid_issuer_chain",
    "invalid_attestation",
}
OTHER_RFCS = {"invalid_cursor", "unsupported_profile", "key_expired", "key_revoked", "key_not_yet_valid"}
ADDED = {"timestamp_in_future", "timestamp_too_old", "packet_expired", "policy_rejected"}


@pytest.mark.req("R-196", "R-094", "R-187")
def test_the_codes_are_those_of_the_table() -> None:
    assert {str(code) for code in ErrorCode} == RFC_0004 | OTHER_RFCS | ADDED
    assert all(code == code.value and f"{code}" == code.value for code in ErrorCode)


@pytest.mark.req("R-201", "R-197")
def test_what_may_be_tried_again() -> None:
    retried = {code: code.retry for code in ErrorCode if code.retry is not Retry.NEVER}
    assert retried == {
        ErrorCode.RATE_LIMITED: Retry.LATER,
        ErrorCode.INTERNAL_ERROR: Retry.AGAIN,
        ErrorCode.UNAUTHENTICATED: Retry.AUTHENTICATE,
    }
    for code in ErrorCode:
        assert retry_advice(code.value) is code.retry


@pytest.mark.req("R-197")
def test_an_unknown_code_is_final_unless_the_relay_says_when_to_come_back() -> None:
    assert retry_advice("zzz") is Retry.NEVER
    assert retry_advice("zzz", retry_after=0) is Retry.LATER
    assert retry_advice("zzz", retry_after=7) is Retry.LATER
    assert retry_advice("") is Retry.NEVER


def test_every_class_of_the_module_is_public_and_a_strata_error() -> None:
    classes = {
        name: value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert all(issubclass(value, errors.StrataError) for value in classes.values())
    assert classes.keys() <= set(errors.__all__)


class Drawn(NamedTuple):
    """One class in the drawing, or one that exists."""

    home: str
    """The module or package that the drawing gives above the class."""
    name: str
    bases: tuple[str, ...]


_NODE = re.compile(r"    (?P<indent>[│ ]*)[├└]── (?P<name>\w+)(?: \((?P<second>\w+)\))?(?: {2,}|$)")
_HOME = re.compile(r"    │   (?P<home>strata[.\w]+)$")


def drawn_classes() -> list[Drawn]:
    """The classes that the docstring draws: a root stands alone, children are indented by four columns."""
    classes: list[Drawn] = []
    above: list[str] = []
    home = ""
    for line in (errors.__doc__ or "").splitlines():
        if root := re.fullmatch(r"    (\w+)", line):
            above = [root[1]]
        elif found := _HOME.fullmatch(line):
            home = found["home"]
        elif node := _NODE.match(line):
            depth = len(node["indent"]) // 4
            above[depth + 1 :] = [node["name"]]
            bases = [above[depth], *([node["second"]] if node["second"] else [])]
            classes.append(Drawn(home, node["name"], tuple(bases)))
    return classes


def classes_of_the_library() -> list[type[BaseException]]:
    """Every exception class that a module of `strata` defines, except private ones and `StrataError`."""
    found: list[type[BaseException]] = []
    for info in pkgutil.walk_packages(strata.__path__, "strata."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in inspect.getmembers(module, inspect.isclass):
            ours = value.__module__ == info.name and value is not errors.StrataError
            if ours and issubclass(value, BaseException) and not name.startswith("_"):
                found.append(value)
    return found


def test_the_drawing_names_every_error_with_its_bases_and_its_home() -> None:
    """The drawing is complete, and renaming, moving or rebasing a class changes one line of it."""
    drawn = drawn_classes()
    assert len(set(drawn)) == len(drawn)
    homes = sorted({one.home for one in drawn}, key=len)
    there = []
    for kind in classes_of_the_library():
        home = [home for home in homes if f"{kind.__module__}.".startswith(f"{home}.")]
        bases = tuple(base.__name__ for base in kind.__bases__ if issubclass(base, BaseException))
        there.append(Drawn(home[-1] if home else kind.__module__, kind.__name__, bases))
    assert sorted(there) == sorted(drawn)


def test_errors_of_the_library_are_strata_errors() -> None:
    """Only tools have others: outcomes of checks and simulations, which no program catches."""
    strangers = {kind for kind in classes_of_the_library() if not issubclass(kind, errors.StrataError)}
    assert all(kind.__module__.startswith("strata.tools.") for kind in strangers)


EXAMPLES: list[tuple[Exception, str]] = [
    (
        errors.InvalidPacket(ErrorCode.INVALID_SCHEMA, "no JSON", detail="malformed_json"),
        "no JSON (invalid_schema: malformed_json)",
    ),
    (
        errors.InvalidPacket(ErrorCode.PACKET_TOO_LARGE, "packet exceeds 5 bytes", max_bytes=5),
        "packet exceeds 5 bytes (packet_too_large)",
    ),
    (errors.InvalidInput(ErrorCode.INVALID_SCHEMA, "no"), "no (invalid_schema)"),
    (
        errors.InvalidMessage("no", detail="unknown_type", client_msg_id="m", subscription_id="s"),
        "no (invalid_schema: unknown_type)",
    ),
    (
        errors.RequestRefused("zzz", "no", detail="d", retry_after=7, max_bytes=5),
        "the relay refused the request: no (zzz, d)",
    ),
    (
        errors.RequestTimeout("PUBLISH", 2.5),
        "no answer to PUBLISH within 2.5 s; its outcome is unknown",
    ),
    (errors.Closed("closed"), "closed"),
    (errors.IdentityError("no DID"), "no DID"),
]


@pytest.mark.parametrize(("error", "sentence"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_errors_speak_in_sentences(error: Exception, sentence: str) -> None:
    assert str(error) == sentence


@pytest.mark.parametrize(("error", "sentence"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_errors_survive_a_process_border(error: Exception, sentence: str) -> None:
    # Workers and Spark tasks pass their errors on pickled.
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == sentence
        assert vars(again) == vars(error)
        assert again.args == error.args


@pytest.mark.req("R-201")
def test_a_refusal_knows_its_advice() -> None:
    assert errors.RequestRefused("rate_limited", "slow down", retry_after=3).retry is Retry.LATER
    assert errors.RequestRefused("blocked_author", "no").retry is Retry.NEVER


def test_an_identity_error_is_a_value_error() -> None:
    assert issubclass(errors.IdentityError, ValueError)
