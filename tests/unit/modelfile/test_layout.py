"""Metadata accessors return the right type or a ModelFileError that names key, file and types."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest
from gguf.gguf_writer import GGUFValue

from tests.support.gguf_files import write_gguf
from thermocline.errors import ModelFileError
from thermocline.modelfile.reader import open_model_file

GET = gguf.GGUFValueType
VALUES = {
    "u8": GGUFValue(255, GET.UINT8),
    "i8": GGUFValue(-128, GET.INT8),
    "u16": GGUFValue(65535, GET.UINT16),
    "i16": GGUFValue(-32768, GET.INT16),
    "u32": GGUFValue(4294967295, GET.UINT32),
    "i32": GGUFValue(-2147483648, GET.INT32),
    "u64": GGUFValue(2**64 - 1, GET.UINT64),
    "i64": GGUFValue(-(2**63), GET.INT64),
    "f32": 1.5,
    "f64": GGUFValue(0.1, GET.FLOAT64),
    "nan": float("nan"),
    "yes": True,
    "no": False,
    "text": "héllo\n\x00 ☃",
    "empty": "",
    "strings": ["", "a", "ß", "x\x00y", "x" * 300, "y" * 200, "\U0001f600", ""],
    "ints": [3, -1, 7],
    "u64s": GGUFValue([2**64 - 1, 0], GET.ARRAY, GET.UINT64),
    "floats": [0.5, -2.0],
    "bools": [True, False, True],
}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("layout") / "all-types.gguf", VALUES, [])
    return open_model_file(path).metadata


def plain(value):
    value = value.value if isinstance(value, GGUFValue) else value
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("key", [key for key in VALUES if key != "nan"])
def test_every_value_comes_back_as_written(metadata, key):
    """raw() gives each value with its Python type, arrays as tuples."""
    value = metadata.raw(key)
    assert value == plain(VALUES[key])
    assert type(value) is type(plain(VALUES[key]))


def test_keys_are_there_in_file_order(metadata):
    """Iteration, length and `in` show the file's keys."""
    assert list(metadata) == ["general.architecture", *VALUES]
    assert len(metadata) == len(VALUES) + 1
    assert "u8" in metadata
    assert "absent" not in metadata
    assert "all-types.gguf" in repr(metadata)


@pytest.mark.parametrize("key", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_get_int_takes_every_integer_type(metadata, key):
    """The width and sign of an integer do not matter to the reader."""
    assert metadata.get_int(key) == plain(VALUES[key])


def test_get_float_takes_floats_and_integers(metadata):
    """A float may be stored as an integer; the result is a float."""
    assert metadata.get_float("f32") == 1.5
    assert metadata.get_float("f64") == 0.1
    assert type(metadata.get_float("i8")) is float


def test_arrays_have_typed_accessors(metadata):
    """Strings, integers, floats and bools come back as tuples of that type."""
    assert metadata.get_strings("strings") == plain(VALUES["strings"])
    assert metadata.get_ints("ints") == (3, -1, 7)
    assert metadata.get_ints("u64s") == (2**64 - 1, 0)
    assert metadata.get_floats("floats") == (0.5, -2.0)
    assert metadata.get_floats("ints") == (3.0, -1.0, 7.0)
    assert type(metadata.get_floats("ints")[0]) is float
    assert metadata.get_bools("bools") == (True, False, True)
    assert metadata.is_array("ints")
    assert not metadata.is_array("u8")
    assert not metadata.is_array("absent")


def test_bool_and_str_accessors(metadata):
    """Bools and strings come back as such."""
    assert metadata.get_bool("yes") is True
    assert metadata.get_bool("no") is False
    assert metadata.get_str("text") == VALUES["text"]
    assert metadata.get_str("empty") == ""


ACCESSORS = ["str", "int", "float", "bool", "strings", "ints", "floats", "bools"]


@pytest.mark.parametrize("accessor", ACCESSORS)
@pytest.mark.parametrize("default", [None, "something else"])
def test_default_is_returned_for_an_absent_key(metadata, accessor, default):
    """An absent key gives the default, whatever it is."""
    assert getattr(metadata, f"get_{accessor}")("absent", default) is default


@pytest.mark.parametrize("accessor", [*(f"get_{name}" for name in ACCESSORS), "raw"])
def test_absent_key_without_default_is_an_error(metadata, accessor):
    """The error names the key and the file."""
    with pytest.raises(ModelFileError, match=r"all-types\.gguf: metadata key 'absent' is missing"):
        getattr(metadata, accessor)("absent")


@pytest.mark.parametrize(
    ("accessor", "key", "found", "expected"),
    [
        ("int", "yes", "BOOL", "an integer"),
        ("int", "f32", "FLOAT32", "an integer"),
        ("int", "text", "STRING", "an integer"),
        ("int", "ints", "array of INT32", "an integer"),
        ("float", "yes", "BOOL", "a number"),
        ("float", "text", "STRING", "a number"),
        ("float", "floats", "array of FLOAT32", "a number"),
        ("bool", "u8", "UINT8", "a bool"),
        ("str", "u8", "UINT8", "a string"),
        ("str", "strings", "array of STRING", "a string"),
        ("strings", "text", "STRING", "an array of strings"),
        ("strings", "ints", "array of INT32", "an array of strings"),
        ("ints", "u8", "UINT8", "an array of integers"),
        ("ints", "floats", "array of FLOAT32", "an array of integers"),
        ("ints", "bools", "array of BOOL", "an array of integers"),
        ("floats", "bools", "array of BOOL", "an array of numbers"),
        ("floats", "strings", "array of STRING", "an array of numbers"),
        ("bools", "ints", "array of INT32", "an array of bools"),
    ],
)
def test_wrong_type_names_key_found_and_expected(metadata, accessor, key, found, expected):
    """The error says what the key holds and what was wanted, also if there is a default."""
    message = f"metadata key {key!r} is {found}, expected {expected}"
    for default in ((), (None,)):
        with pytest.raises(ModelFileError, match=message) as caught:
            getattr(metadata, f"get_{accessor}")(key, *default)
        assert caught.value.offset is not None


def test_a_float_that_is_not_finite_is_refused(metadata):
    """NaN as a hyperparameter is an error, not a silent poison."""
    with pytest.raises(ModelFileError, match="'nan' is nan, not a finite number"):
        metadata.get_float("nan")


def test_tensor_info_is_frozen_and_knows_its_row(tmp_path):
    """The tensor table's rows can not be changed; shape is slowest first, as in numpy."""
    x = np.ones((4, 2, 64), dtype=np.float32)
    model = open_model_file(write_gguf(tmp_path / "t.gguf", {}, [("w", "Q8_0", x)]))
    info = model.tensors["w"]
    assert (info.shape, info.format.name, info.nbytes, info.shard) == ((4, 2, 64), "Q8_0", 544, 0)
    assert info.row_bytes == 68
    assert info.path == str(tmp_path / "t.gguf")
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.offset = 0
