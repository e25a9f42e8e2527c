"""The objects of a bucket: who comes first, answers that are lost, and what the environment must contain."""

from __future__ import annotations

import pickle
import threading
from datetime import timedelta

import pytest
from strata_pipeline.errors import ObjectStoreError, UsageError
from strata_pipeline.lake.stores import objects
from strata_pipeline.lake.stores.objects import ObjectStore, several
from strata_pipeline.lake.stores.records import ObjectRecords

from tests.support.object_stores import Asked, ObjectServer

HTTPS = {"AWS_ENDPOINT_URL": "https://store.example"}


@pytest.fixture
def store(place: str) -> ObjectStore:
    return ObjectStore.at(place)


def test_objects_are_put_got_listed_and_deleted(store):
    for n in range(3):
        store.put(f"day=1/{n}", b"%d" % n)
    store.put("day=2/0", b"new")
    store.put("day=2/0", b"newer")
    assert list(store.keys("")) == ["day=1/0", "day=1/1", "day=1/2", "day=2/0"]
    assert list(store.keys("day=1", "day=1/0")) == ["day=1/1", "day=1/2"]
    store.put("0", b"")
    assert store.directly_below("") == (["day=1", "day=2"], ["0"]) and list(store.keys("day")) == []
    assert store.directly_below("day=2") == ([], ["day=2/0"])
    assert store.get("day=2/0") == b"newer" and store.exists("day=1/2")
    assert list(store.get_all(f"day=1/{n}" for n in (2, 0, 1))) == [b"2", b"0", b"1"]
    store.delete(["day=1/2", "day=1/3"])
    assert not store.exists("day=1/2")
    with pytest.raises(FileNotFoundError, match=f"{store.url('day=1/2')} is missing"):
        store.get("day=1/2")


@pytest.mark.parametrize("start", [2, 5, 8])
def test_an_object_that_ends_before_a_range_is_damaged_and_the_store_is_not(store, start):
    store.put("a", b"12345")
    assert store.get_range("a", 2, 5) == b"345"
    with pytest.raises(ValueError, match=f"^{store.url('a')} has 5 bytes, and 9 were written$"):
        store.get_range("a", start, 9)
    with pytest.raises(FileNotFoundError, match=f"{store.url('b')} is missing"):
        store.get_range("b", start, 9)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_of_several_that_are_asked_for_at_once_all_have_ended_when_one_has_failed(count):
    begun, ended = list[int](), list[int]()
    others = threading.Event()

    def ask(number: int) -> int:
        begun.append(number)
        if number == 0:
            others.set()
            raise KeyError(number)
        others.wait()
        ended.append(number)
        return number

    with pytest.raises(KeyError):
        list(several(ask, range(count), 2))
    assert sorted(begun) == [0, *sorted(ended)] and len(begun) <= 4
    assert list(several(lambda number: number, range(1, count), 2)) == list(range(1, count))


def test_the_first_who_puts_a_name_has_it(store):
    assert store.put_new("name", b"one") and not store.put_new("name", b"two")
    assert store.put_new("name", b"one") and store.get("name") == b"one"


def test_a_lost_answer_is_looked_up(object_server: ObjectServer, store):
    lost: list[Asked] = []

    def lose_first(asked: Asked) -> str | None:
        if asked.is_conditional:
            lost.append(asked)
        return "500 Lost" if asked.is_conditional and len(lost) == 1 else None

    object_server.after = lose_first
    assert store.put_new("name", b"one") and len(lost) == 2  # the second was refused: the first had arrived
    lost.clear()
    assert not store.put_new("name", b"two") and store.get("name") == b"one"


def test_a_rival_who_was_refused_as_well_leaves_the_name_to_us(object_server: ObjectServer, store):
    asked_before: list[Asked] = []

    def conflict(asked: Asked) -> str | None:
        asked_before.append(asked)
        return "409 Conflict" if asked.is_conditional and len(asked_before) == 1 else None

    object_server.before = conflict
    assert store.put_new("name", b"one") and store.get("name") == b"one"


def test_what_the_store_says_is_told_without_the_keys(object_server: ObjectServer, store):
    object_server.before = lambda asked: "403 Forbidden"
    for ask in (
        lambda: store.get("name"),
        lambda: store.put("name", b""),
        lambda: store.put_new("name", b""),
        lambda: list(store.keys("folder")),
        lambda: store.delete(["name"]),
    ):
        with pytest.raises(ObjectStoreError, match=r"the object store, at s3://lakes/") as told:
            ask()
        assert "secret" not in str(told.value) and "\n" not in str(told.value)


def test_a_store_that_is_not_there_and_a_bucket_that_is_not_there(object_server: ObjectServer, monkeypatch):
    monkeypatch.setattr(objects, "_PATIENCE", timedelta(seconds=0.1))
    nobody = object_server.environment | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    with pytest.raises(ObjectStoreError, match="error sending request"):
        ObjectStore.at("s3://lakes/a", nobody).exists("name")
    with pytest.raises(ObjectStoreError, match=r"NoSuchBucket|404"):
        list(ObjectStore.at("s3://elsewhere/a", object_server.environment).keys("folder"))


def test_settings_travel_and_connections_and_secrets_in_words_do_not(store):
    store.put("name", b"one")
    again = pickle.loads(pickle.dumps(store))
    assert again.get("name") == b"one" and again.url() == store.url()
    assert "secret" not in repr(store)


def test_plain_http_is_only_for_those_who_ask_for_it():
    plain = {"AWS_ENDPOINT_URL": "http://store.example"}
    with pytest.raises(UsageError, match=r"is not encrypted.*AWS_ALLOW_HTTP=true"):
        ObjectStore.at("s3://lakes/a", plain)
    assert ObjectStore.at("s3://lakes/a", plain | {"AWS_ALLOW_HTTP": "true"}).plain_http
    assert not ObjectStore.at("s3://lakes/a", HTTPS).plain_http


def test_the_environment_names_endpoint_region_and_keys():
    told = ObjectStore.at(
        "s3://lakes",
        HTTPS | {"AWS_ENDPOINT_URL_S3": "https://s3.example", "AWS_DEFAULT_REGION": "eu-north-1"},
    )
    assert told.settings == {"endpoint": "https://s3.example", "region": "eu-north-1"}
    assert (told.bucket, told.prefix, told.url("x")) == ("lakes", "", "s3://lakes/x")


@pytest.mark.parametrize("place", ["s3://", "s3://a", "s3://lakes/../b", "s3://lakes/a b", "s3://lakes//b"])
def test_places_that_are_none_are_refused(place):
    with pytest.raises(UsageError, match="s3://bucket/prefix"):
        ObjectStore.at(place, HTTPS)


def test_records_are_found_from_a_name_on(store):
    records = ObjectRecords(store, "_manifests")
    names = [f"{n:010}.json" for n in range(12)]
    for name in (*names[:8], names[9], "days/2024-10-04.json"):
        store.put(f"_manifests/{name}", name.encode())
    assert records.leading(names[5:]) == names[5:8] and records.leading(names[8:]) == []
    assert records.has_any(names[9:]) and not records.has_any(names[10:])
    assert records.names() == [*names[:8], names[9]] and records.names("days") == ["2024-10-04.json"]
    assert list(records.read_all(names[:2])) == [name.encode() for name in names[:2]]
    assert records.place(names[0]) == store.url(f"_manifests/{names[0]}")
