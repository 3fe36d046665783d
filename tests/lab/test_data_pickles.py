"""A pickle gives arrays and plain containers, or an error; it never runs anything."""

from __future__ import annotations

import collections
import functools
import operator
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from memnorm.lab.data import pickles
from memnorm.lab.errors import DataCorrupt


def name_of(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


class Calls:
    """An object whose pickle says: call this with that."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", ">i4", "bool"])
def test_arrays_of_numbers_are_read_as_they_were(dtype, protocol):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    found = pickles.read(pickle.dumps({"a": array}, protocol), "x")["a"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


def test_columns_first_stays_columns_first():
    array = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    np.testing.assert_array_equal(pickles.read(pickle.dumps(array, 2), "x"), array)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_both_generations_of_numpy_are_read(module):
    content = pickle.dumps(np.arange(3, dtype=np.uint8), 2)
    for known in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        content = content.replace(known, module.encode())
    assert pickles.read(content, "x").tolist() == [0, 1, 2]


def test_plain_containers_and_values_are_read_as_they_were():
    value = {"list": [1, -2, 2.5, None, True], "tuple": (b"bytes", "text ö"), "deep": {"a": [{"b": ()}]}}
    assert pickles.read(pickle.dumps(value, 2), "x") == value


def test_a_number_of_numpy_becomes_a_plain_one():
    value = pickles.read(pickle.dumps([np.int64(-5), np.float32(0.5)], 2), "x")
    assert value == [-5, 0.5]
    assert [type(one) for one in value] == [int, float]


def test_what_is_shared_stays_shared_so_nothing_grows():
    value = [0]
    for _ in range(60):  # written out, 2**60 numbers
        value = [value, value]
    found = pickles.read(pickle.dumps(value, 2), "x")
    assert found[0] is found[1]


HOSTILE = {
    "os.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "builtins.eval": lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"),
    "builtins.exec": lambda mark: Calls(exec, f"open({str(mark)!r}, 'w')"),
    "subprocess.Popen": lambda mark: Calls(subprocess.Popen, ["touch", str(mark)]),
    "nested getattr": lambda mark: Calls(getattr, Calls(getattr, "text", "upper"), "__call__"),
    "nested": lambda mark: {"data": [1, (2, {"deep": Calls(os.system, f"touch {mark}")})]},
    "attrgetter": lambda mark: Calls(operator.attrgetter, "__class__.__base__"),
    "partial": lambda mark: Calls(functools.partial, os.system, f"touch {mark}"),
    "a container of its own": lambda mark: collections.OrderedDict(a=1),
    "numpy.load": lambda mark: Calls(np.load, str(mark)),
    "numpy.memmap": lambda mark: Calls(np.memmap, str(mark), "u1", "w+", 0, (4,)),
    "numpy.fromfile": lambda mark: Calls(np.fromfile, str(mark)),
    "numpy.savetxt": lambda mark: Calls(np.savetxt, str(mark), [1]),
    "bytearray": lambda mark: bytearray(b"abc"),
    "a class": lambda mark: dict,
    "a set": lambda mark: {1},
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_pickle_runs_nothing_and_what_it_wanted_is_named(kind, protocol, tmp_path):
    mark = tmp_path / "mark"
    content = pickle.dumps(HOSTILE[kind](mark), protocol)
    with pytest.raises(DataCorrupt, match=r"file\.bin: the pickle asks for .*nothing was run"):
        pickles.read(content, "file.bin")
    assert not mark.exists()


def test_the_refused_name_is_in_the_message():
    with pytest.raises(DataCorrupt, match=rf"asks for {os.name}\.system"):
        pickles.read(pickle.dumps(Calls(os.system, "true"), 2), "x")


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(np.array([{}, Calls(os.system, "true")], dtype=object), 2),
        pickle.dumps(np.array([1, 2], dtype=object), 2),
        pickle.dumps(np.zeros(2, dtype=[("a", "u1"), ("b", "f4")]), 2),
        pickle.dumps(np.array(["2001-01-01"], dtype="datetime64[s]"), 2),
        pickle.dumps(np.array(["text"]), 2),
        pickle.dumps(np.zeros(2, "V3"), 2),
        pickle.dumps(np.ma.masked_array([1, 2]), 2),
        pickle.dumps(np.float64, 2),
        pickle.dumps(np.zeros(2, np.complex64), 2),
    ],
    ids=["object with code", "object", "fields", "dates", "text", "void", "masked", "type", "complex"],
)
def test_arrays_of_anything_but_plain_numbers_are_refused(content):
    with pytest.raises(DataCorrupt, match="only arrays and plain containers are read"):
        pickles.read(content, "x")


ENCODE = name_of("_codecs", "encode")
DTYPE = name_of("numpy", "dtype")
NDARRAY = name_of("numpy", "ndarray")
RECONSTRUCT = name_of("numpy.core.multiarray", "_reconstruct")
EMPTY = RECONSTRUCT + b"(" + NDARRAY + b"(K\x00t" + text("b") + b"tR"  # an array before its state
U1 = DTYPE + b"(" + text("u1") + b"tR"
STATE = b"(K\x01(K\x02t" + U1 + b"I00\nC\x02abtb."  # two bytes


def test_the_crafted_pickles_below_are_right_but_for_what_they_show():
    assert pickles.read(EMPTY + STATE, "x").tolist() == [97, 98]


@pytest.mark.parametrize(
    "content",
    {
        "codec": ENCODE + b"(" + text("abc") + text("rot13") + b"tR.",
        "codec of an object": ENCODE + b"(" + U1 + text("latin1") + b"tR.",
        "dtype of a list": DTYPE + b"(](" + text("u1") + b"etR.",
        "dtype with a comma": DTYPE + b"(" + text("u1,O") + b"tR.",
        "ndarray called": NDARRAY + b"((K\x04ttR.",
        "ndarray as an object": NDARRAY + b")\x81.",
        "an array that stays empty": EMPTY + b".",
        "a dtype by itself": U1 + b".",
        "a name by itself": RECONSTRUCT + b".",
        "another type of array": RECONSTRUCT + b"(" + DTYPE + b"(K\x00t" + text("b") + b"tR" + STATE,
        "numbers of no kind": EMPTY + b"(K\x01(K\x02t" + text("u1") + b"I00\nC\x02abtb.",
        "a text for the bytes": EMPTY + b"(K\x01(K\x02t" + U1 + b"I00\n" + text("ab") + b"tb.",
        "a sub-array": EMPTY + b"(K\x01(K\x02t" + U1 + b"(K\x03" + text("|") + b"](K\x01eNNtbI00\nC\x02abtb.",
        "fields": EMPTY + b"(K\x01(K\x02t" + U1 + b"(K\x03" + text("|") + b"N](K\x01eNtbI00\nC\x02abtb.",
        "another order of bytes": EMPTY + b"(K\x01(K\x02t" + U1 + b"(K\x03" + text("?") + b"NNNtbI00\nC\x02abtb.",
        "an array of a list": EMPTY + b"(K\x01(K\x01t" + U1 + b"I00\n](K\x01etb.",
        "too few bytes": EMPTY + b"(K\x01(K\x09t" + U1 + b"I00\nC\x02abtb.",
        "a negative side": EMPTY + b"(K\x01(J\xff\xff\xff\xfft" + U1 + b"I00\nC\x02abtb.",
        "a long state": EMPTY + b"(K\x01K\x02K\x03K\x04K\x05K\x06tb.",
        "attributes set on a stand-in": ENCODE + b"}" + text("x") + b"K\x01sb.",
        "slots set on a stand-in": RECONSTRUCT + b"N}" + text("__call__") + b"K\x01s\x86b.",
        "slots set on an array": EMPTY + b"N}" + text("value") + b"K\x01s\x86b.",
        "extension": b"\x82\x01.",
        "persistent": text("x") + b"Q.",
        "itself": b"]q\x00h\x00a.",
        "nothing": b"",
        "a beginning": pickle.dumps(np.zeros(50), 2)[:40],
        "rubbish": b"\x00\xff rubbish",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_crafted_pickle_is_refused_as_corrupt(content):
    with pytest.raises(DataCorrupt, match=r"^x"):
        pickles.read(content[1], "x")


def test_a_pickle_cannot_change_how_the_next_one_is_read():
    for stand_in in (ENCODE, DTYPE, NDARRAY, RECONSTRUCT):
        for state in (b"}" + text("x") + b"K\x01sb.", b"N}" + text("__call__") + b"K\x01s\x86b."):
            with pytest.raises(DataCorrupt):
                pickles.read(stand_in + state, "x")
    assert pickles.read(pickle.dumps(np.arange(3), 2), "x").tolist() == [0, 1, 2]


def test_reading_does_not_import_what_a_pickle_names():
    sys.modules.pop("antigravity", None)
    with pytest.raises(DataCorrupt, match=r"antigravity\.geohash"):
        pickles.read(name_of("antigravity", "geohash") + b".", "x")
    assert "antigravity" not in sys.modules
