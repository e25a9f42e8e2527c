"""The bootstrap file: what it may contain, and that a fault in it prevents the start."""

from __future__ import annotations

import json

import pytest
from strata.protocol.documents import VerificationMethod, build_document, key_multibase, method_id
from strata.protocol.ids import Identity

from relayd.config import ConfigurationError
from relayd.identity.bootstrap import BootstrapContents, effective_clock_skew, read_bootstrap

ALICE = Identity(bytes(range(32)))
NAMED = "did:strata:relay_1"


@pytest.fixture
def write(tmp_path):
    def write(value):
        path = tmp_path / "bootstrap.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


def test_no_file_says_nothing():
    assert read_bootstrap(None) == BootstrapContents() and not BootstrapContents().names()


@pytest.mark.req("R-047", "R-048", "R-056")
def test_documents_and_keys_are_read(write):
    document = build_document(
        NAMED, [VerificationMethod(method_id(NAMED), ALICE.public_key, 5)], created_at=5
    )
    found = read_bootstrap(
        write(
            {
                "did_documents": [document.value],
                "keys": {"did:device:cam-1": key_multibase(ALICE.public_key)},
                "clock_skew_seconds": 90,
            }
        )
    )
    assert found.documents == {NAMED: (document,)}
    assert found.keys == {"did:device:cam-1": ALICE.public_key}
    assert found.names() == {NAMED, "did:device:cam-1"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("nonsense", "malformed"),
        ("\ufeff[]", "object"),
        ("\0{\0}", "the text is UTF-16"),
        ("[]", "object"),
        ({"did_document": []}, "nearest is did_documents"),
        ({"did_documents": [{}]}, "did_documents[0]"),
        ({"keys": {"nobody": "z6Mk"}}, "not a DID"),
        ({"keys": {NAMED: "z6Mkbad"}}, "base58btc"),
        ({"clock_skew_seconds": "90"}, "int"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_starts(write, value, problem):
    with pytest.raises(ConfigurationError, match=r"bootstrap\.json") as caught:
        read_bootstrap(write(value))
    assert problem in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_bootstrap(tmp_path / "none.json")


@pytest.mark.req("R-064")
@pytest.mark.parametrize(
    ("setting", "file", "effective"),
    [(300, None, 300), (60, None, 60), (30, None, 300), (900, None, 300), (120, 60, 60), (120, 30, 300)],
)
def test_the_clock_skew_in_use(setting, file, effective):
    assert effective_clock_skew(setting, BootstrapContents(clock_skew_seconds=file)) == effective
