"""Settings: the documented values, the environment, and values that cannot be intended."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from strata.txrx.settings import ENVIRONMENT_PREFIX, TxRxOptions, TxRxSettings


@pytest.mark.req("T-041", "T-050", "T-065", "T-076")
def test_the_documented_defaults() -> None:
    settings = TxRxSettings()
    assert settings.codec_max_frame_length == 67_108_864
    assert settings.message_ack_every_n_messages == 1000
    assert settings.message_ack_time_interval == 0.5
    assert settings.message_delivery_timeout == 30
    assert settings.queue_capacity == 1024
    assert settings.outbox_limit is None
    assert (settings.backoff_base, settings.backoff_cap) == (0.001, 1.0)


@pytest.mark.req("T-035")
def test_sessions_are_remembered_for_longer_than_senders_try() -> None:
    settings = TxRxSettings()
    assert settings.session_timeout > settings.message_delivery_timeout
    with pytest.raises(ValueError, match="session_timeout has to be longer"):
        TxRxSettings(message_delivery_timeout=120, session_timeout=120)


ENVIRONMENT = {
    "CODEC_MAX_FRAME_LENGTH": ("1024", 1024),
    "MESSAGE_ACK_EVERY_N_MESSAGES": ("7", 7),
    "MESSAGE_ACK_TIME_INTERVAL": ("0.25", 0.25),
    "MESSAGE_ACK_EAGERLY": ("no", False),
    "MESSAGE_DELIVERY_TIMEOUT": ("10", 10.0),
    "QUEUE_CAPACITY": ("3", 3),
    "OUTBOX_LIMIT": ("5", 5),
    "SESSION_TIMEOUT": ("99", 99.0),
    "MAX_SESSIONS": ("11", 11),
    "MAX_CONNECTIONS": ("12", 12),
    "LINK_TIMEOUT": ("4", 4.0),
    "IDLE_FRAME_TIMEOUT": ("5", 5.0),
    "CONNECT_TIMEOUT": ("6", 6.0),
    "BACKOFF_BASE": ("0.5", 0.5),
    "BACKOFF_CAP": ("2", 2.0),
    "TLS_CERTIFICATE": ("/c.pem", Path("/c.pem")),
    "TLS_KEY": ("/k.pem", Path("/k.pem")),
    "TLS_AUTHORITIES": ("/a.pem", Path("/a.pem")),
    "TLS_MUTUAL": ("on", True),
}


@pytest.mark.req("T-099")
def test_everything_can_be_set_in_the_environment() -> None:
    texts = {ENVIRONMENT_PREFIX + name: text for name, (text, _) in ENVIRONMENT.items()}
    settings = TxRxSettings.from_environment(texts)
    assert dataclasses.asdict(settings) == {name.lower(): value for name, (_, value) in ENVIRONMENT.items()}


def test_the_options_are_the_settings() -> None:
    settings = {field.name: field.type for field in dataclasses.fields(TxRxSettings)}
    options = {
        name: getattr(type_, "__forward_arg__", type_) for name, type_ in TxRxOptions.__annotations__.items()
    }
    assert options == settings


@pytest.mark.req("T-099")
def test_the_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CHANNEL_MESSAGE_DELIVERY_TIMEOUT", "10")
    monkeypatch.setenv("STRATA_CHANNEL_QUEUE_CAPACITY", "3")
    settings = TxRxSettings.from_environment(queue_capacity=4)
    assert settings.message_delivery_timeout == 10
    assert settings.queue_capacity == 4, "what is given in code goes before"


def test_empty_text_sets_what_can_be_left_out() -> None:
    names = ("OUTBOX_LIMIT", "TLS_CERTIFICATE", "TLS_KEY", "TLS_AUTHORITIES")
    found = TxRxSettings.from_environment({ENVIRONMENT_PREFIX + name: "" for name in names})
    assert found == TxRxSettings()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), (" Yes", True), ("0", False), ("off", False)]
)
def test_true_and_false_have_several_names(text: str, value: bool) -> None:
    assert TxRxSettings.from_environment({"STRATA_CHANNEL_TLS_MUTUAL": text}).tls_mutual is value


@pytest.mark.req("T-099")
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("QUEUE_CAPACITY", "many", "whole number"),
        ("QUEUE_CAPACITY", "", "whole number"),
        ("QUEUE_CAPACITY", "1.5", "whole number"),
        ("OUTBOX_LIMIT", "x", "whole number"),
        ("MESSAGE_ACK_TIME_INTERVAL", "500 ms", "number of seconds"),
        ("MESSAGE_ACK_EAGERLY", "maybe", "true or false"),
    ],
)
def test_text_that_cannot_be_read_is_named(name: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        TxRxSettings.from_environment({ENVIRONMENT_PREFIX + name: text})
    assert f"STRATA_CHANNEL_{name}={text!r}" in str(caught.value)


@pytest.mark.req("T-099")
@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 0} for name in ("message_ack_every_n_messages", "queue_capacity")),
        *({name: 0} for name in ("max_sessions", "max_connections", "outbox_limit")),
        {"outbox_limit": -1},
        {"codec_max_frame_length": 63},
        {"codec_max_frame_length": 2**63},
        *({"message_ack_time_interval": value} for value in (0, -1, float("inf"), float("nan"))),
        *({name: 0.0} for name in ("message_delivery_timeout", "session_timeout", "link_timeout")),
        *({name: 0.0} for name in ("idle_frame_timeout", "connect_timeout", "backoff_base", "backoff_cap")),
        {"backoff_base": 2.0, "backoff_cap": 1.0},
        {"tls_key": Path("/k.pem")},
        {"tls_certificate": Path("/c.pem")},
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TxRxSettings(**wrong)


def test_the_least_that_can_be_meant() -> None:
    TxRxSettings(codec_max_frame_length=64, queue_capacity=1, outbox_limit=1, max_sessions=1)
    TxRxSettings(codec_max_frame_length=2**63 - 1, backoff_base=1, backoff_cap=1)
