"""Cursors: opaque, versioned, integrity-checked, bound to the order and to nothing else."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relayd.cursor import CursorCodec, InvalidCursor
from relayd.lineage import KnownLog, Lineage, Term

KEY = bytes(range(32))
sequences = st.integers(min_value=0, max_value=2**53 - 1)


@pytest.mark.req("R-155")
@given(sequences, st.booleans())
def test_what_one_process_encodes_another_with_the_same_key_decodes(sequence, ascending):
    text = CursorCodec(KEY).encode(sequence, ascending=ascending)
    assert CursorCodec(KEY).decode(text, ascending=ascending) == sequence
    assert text.startswith("2.")


@pytest.mark.req("R-154")
@given(sequences)
@example(100)
@example(200)
def test_a_cursor_says_in_which_term_its_packet_was_appended(sequence):
    terms = [Term(1, b"aaaa", 0, 1), Term(2, b"bbbb", 100, 1), Term(3, b"cccc", 200, 7)]
    codec = CursorCodec(KEY, KnownLog(Lineage(terms)))
    term = terms[0] if sequence <= 100 else terms[1] if sequence <= 200 else terms[2]
    assert codec.open(codec.encode(sequence), ascending=True) == (sequence, term.tag, term.epoch)


@pytest.mark.req("R-156")
@given(sequences, st.booleans())
def test_a_cursor_of_the_other_order_is_invalid(sequence, ascending):
    codec = CursorCodec(KEY)
    with pytest.raises(InvalidCursor):
        codec.decode(codec.encode(sequence, ascending=ascending), ascending=not ascending)


@pytest.mark.req("R-155", "R-157")
@given(sequences, st.data())
def test_a_changed_character_is_invalid(sequence, data):
    codec = CursorCodec(KEY)
    text = codec.encode(sequence)
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.characters().filter(lambda c: c != text[at]))
    with pytest.raises(InvalidCursor):
        codec.decode(text[:at] + new + text[at + 1 :], ascending=True)


@pytest.mark.req("R-155", "R-157")
def test_a_place_has_one_text():
    codec = CursorCodec(KEY)
    text = codec.encode(2**53 - 1)
    assert text.upper() != text
    with pytest.raises(InvalidCursor):
        codec.decode(text.upper(), ascending=True)


@pytest.mark.req("R-157")
@given(st.text())
def test_foreign_text_is_invalid(text):
    with pytest.raises(InvalidCursor):
        CursorCodec(KEY).decode(text, ascending=True)


@pytest.mark.req("R-157")
def test_a_cursor_of_another_relay_is_invalid():
    with pytest.raises(InvalidCursor):
        CursorCodec(KEY).decode(CursorCodec(bytes(32)).encode(7), ascending=True)
