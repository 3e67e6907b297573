"""The catalogue of broken files: each known bug class of GGUF readers is one named typed error."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import dataclass, replace

import pytest

from tests.support.gguf_files import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    RawField,
    RawFile,
    RawTensor,
    array_of,
    text,
    u32,
    u64,
)
from thermocline.errors import ModelFileError
from thermocline.modelfile.reader import open_model_file

ARCH = RawField(b"general.architecture", STRING, text(b"toy"))
TENSOR = RawTensor()
FIRST_FIELD = 4 + 4 + 8 + 8
ONE = u32(1)


@dataclass(frozen=True)
class Case:
    """A broken file: its bytes, what the error says, and at which byte (None: not checked)."""

    content: bytes
    says: str
    offset: int | None = None


def fields(*entries):
    return RawFile(fields=[ARCH, *entries]).build()


def field(value, *, type_id, key=b"k"):
    """A file whose only metadata entry is this one."""
    return RawFile(fields=[RawField(key, type_id, value)]).build()


def tensor(**changes):
    return RawFile(tensors=[replace(TENSOR, **changes)]).build()


def alignment(value, type_id=UINT32):
    return field(value, type_id=type_id, key=b"general.alignment")


VALUE = FIRST_FIELD + 8 + 1 + 4  # where the value of the only, one-letter key starts
GOOD = RawFile().build()

CASES = {
    # What the file is
    "magic of another format": Case(RawFile(magic=b"GGML").build(), "starts with b'GGML'", 0),
    "zip archive": Case(b"PK\x03\x04" + bytes(400), "not with b'GGUF'", 0),
    "one byte": Case(b"G", "magic: 4 bytes are needed", 0),
    "magic only": Case(b"GGUF", "version: 4 bytes are needed", 4),
    "version 0": Case(RawFile(version=0).build(), "version 0 is not supported", 4),
    "version 1": Case(RawFile(version=1).build(), "version 1 is not supported", 4),
    "version 4": Case(RawFile(version=4).build(), "version 4 is not supported", 4),
    "version 2^32-1": Case(RawFile(version=2**32 - 1).build(), "is not supported", 4),
    "big-endian": Case(RawFile(version=3 << 24).build(), "big-endian GGUF (version 3)", 4),
    # Counts times entry size overflow (TALOS-2024-1913, CVE-2024-21802)
    "tensor count 2^64-1": Case(RawFile(num_tensors=2**64 - 1).build(), "tensors are declared", 8),
    "tensor count 2^61 overflows": Case(RawFile(num_tensors=2**61).build(), "are declared", 8),
    "tensor count beyond the file": Case(RawFile(num_tensors=60_000).build(), "only", 8),
    "tensor count one too many": Case(RawFile(num_tensors=2).build(), "tensor 1"),
    "key count 2^64-1": Case(RawFile(num_keys=2**64 - 1).build(), "metadata keys are declared", 16),
    "key count 2^60 overflows": Case(RawFile(num_keys=2**60).build(), "are declared", 16),
    "key count beyond the file": Case(RawFile(num_keys=60_000).build(), "bytes follow", 16),
    "key count one too many": Case(RawFile(num_keys=2).build(), "name of tensor 0"),
    # Keys
    "empty key": Case(field(ONE, type_id=UINT32, key=b""), "key 0 is empty", FIRST_FIELD),
    "duplicate key": Case(fields(ARCH), "'general.architecture' appears twice"),
    "key not UTF-8": Case(
        field(ONE, type_id=UINT32, key=b"\xff"), "not valid UTF-8", FIRST_FIELD + 8
    ),
    "key too long": Case(
        field(ONE, type_id=UINT32, key=b"k" * 65_536), "65536 bytes, more than", FIRST_FIELD
    ),
    "key length 2^63": Case(
        GOOD[:FIRST_FIELD] + u64(2**63) + GOOD[FIRST_FIELD + 8 :], "more than the", FIRST_FIELD
    ),
    # Values; unbounded lengths must not allocate (ollama #17042, mlx #4256)
    "value type unknown": Case(field(ONE, type_id=13), "is 13, which is no metadata type"),
    "value type 2^32-1": Case(field(ONE, type_id=2**32 - 1), "which is no metadata type"),
    "string length 2^64-1": Case(
        field(text(b"x", length=2**64 - 1), type_id=STRING), "more than the", VALUE
    ),
    "string longer than the file": Case(
        field(text(b"x", length=10_000), type_id=STRING), "10000 bytes are needed"
    ),
    "string not UTF-8": Case(field(text(b"ab\xc3("), type_id=STRING), "UTF-8", VALUE + 8 + 2),
    "string with a surrogate": Case(field(text(b"\xed\xa0\x80"), type_id=STRING), "UTF-8"),
    "bool of 2": Case(field(b"\x02", type_id=BOOL), "bool 2, which must be 0 or 1", VALUE),
    # Arrays
    "array element type unknown": Case(field(array_of(77, ONE, 1), type_id=ARRAY), "is 77"),
    "array of arrays longer than the file": Case(
        field(array_of(ARRAY, array_of(UINT8, b"x", 1), 9_000), type_id=ARRAY), "bytes follow"
    ),
    "array of arrays of an unknown type": Case(
        field(array_of(ARRAY, array_of(99, b"x" * 8, 1), 1), type_id=ARRAY), "is 99"
    ),
    "array nested 10,000 deep": Case(
        field(array_of(ARRAY, b"", 1) * 10_000, type_id=ARRAY), "more than 8 deep"
    ),
    "70,000 arrays in an array": Case(
        field(array_of(ARRAY, array_of(UINT8, b"", 0) * 70_000, 70_000), type_id=ARRAY),
        "more than the 65536 allowed",
    ),
    "array count 2^64-1": Case(
        field(array_of(UINT8, b"x", 2**64 - 1), type_id=ARRAY), "are declared", VALUE + 4
    ),
    "array count times size overflows": Case(
        field(array_of(UINT64, u64(1), 2**61 + 1), type_id=ARRAY), "are declared", VALUE + 4
    ),
    "array longer than the file": Case(
        field(array_of(INT32, u32(1) * 4, 5_000), type_id=ARRAY), "bytes follow", VALUE + 4
    ),
    "string array longer than the file": Case(
        field(array_of(STRING, text(b"a"), 200), type_id=ARRAY), "bytes follow", VALUE + 4
    ),
    "string in an array longer than the file": Case(
        field(array_of(STRING, text(b"a") + text(b"b", length=2**40), 2), type_id=ARRAY),
        "string 1 of metadata 'k'",
    ),
    "string in an array of length 2^64-1": Case(
        field(array_of(STRING, text(b"a", length=2**64 - 1), 1), type_id=ARRAY), "string 0 of"
    ),
    "string in an array not UTF-8": Case(
        field(array_of(STRING, text(b"good") + text(b"\xe2\x82"), 2), type_id=ARRAY),
        "string 1 of metadata 'k' is not valid UTF-8",
        VALUE + 12 + 8 + 4 + 8,
    ),
    # The character is whole only across the border, where the second one's length lies between
    "character split over two strings": Case(
        field(array_of(STRING, text(b"\xc3") + text(b"\xa9"), 2), type_id=ARRAY), "string 0 of"
    ),
    "bool of 255 in an array": Case(
        field(array_of(BOOL, b"\x00\x01\xff", 3), type_id=ARRAY), "bool 255", VALUE + 12 + 2
    ),
    # Alignment (llama.cpp #26318)
    "alignment 0": Case(alignment(u32(0)), "general.alignment is 0, expected a power of two"),
    "alignment 4": Case(alignment(u32(4)), "is 4, expected a power of two"),
    "alignment 24": Case(alignment(u32(24)), "is 24, expected a power of two"),
    "alignment 2^31": Case(alignment(u32(2**31)), "expected a power of two from 8 to"),
    "alignment as UINT64": Case(alignment(u64(32), UINT64), "is UINT64, expected UINT32"),
    "alignment as a float": Case(alignment(u32(0x42000000), FLOAT32), "is FLOAT32, expected"),
    "alignment as a string": Case(alignment(text(b"32"), STRING), "is STRING, expected UINT32"),
    "alignment as an array": Case(
        alignment(array_of(UINT32, u32(32), 1), ARRAY), "is array of UINT32, expected UINT32"
    ),
    # Tensor names
    "tensor name empty": Case(tensor(name=b""), "name of tensor 0 is empty"),
    "tensor name too long": Case(tensor(name=b"n" * 65), "65 bytes, more than the 64"),
    "tensor name not UTF-8": Case(tensor(name=b"\x80"), "name of tensor 0 is not valid UTF-8"),
    "tensor name twice": Case(
        RawFile(tensors=[RawTensor(dims=(8,)), RawTensor(dims=(8,), offset=32)]).build(),
        "tensor 'a.weight' appears twice",
    ),
    # Dimensions (CVE-2025-53630, CVE-2026-27940; llama.cpp #24263)
    "no dimensions": Case(tensor(dims=()), "has 0 dimensions"),
    "five dimensions": Case(tensor(dims=(1, 1, 1, 1, 1)), "has 5 dimensions"),
    "2^32-1 dimensions": Case(tensor(count=2**32 - 1), "has 4294967295 dimensions"),
    "row of no elements": Case(tensor(dims=(0, 2)), "no or too many elements"),
    "dimension of no rows": Case(tensor(dims=(32, 0)), "no or too many elements"),
    "dimension negative": Case(tensor(dims=(2**64 - 32, 2)), "no or too many elements"),
    "dimension 2^42+1 times 2^22": Case(tensor(dims=(2**42 + 1, 2**22)), "would take"),
    "dimension product wraps to a small size": Case(tensor(dims=(2**32, 2**32 + 1)), "would take"),
    "dimension product wraps to zero": Case(tensor(dims=(32, 2**62, 4)), "would take"),
    "dimension product 2^63 in bytes": Case(tensor(dims=(2**61, 1)), "would take"),
    "dimension product of 31 bits": Case(tensor(dims=(2**16, 2**15)), "but the file has only"),
    # Types
    "tensor type removed from ggml": Case(tensor(type_id=4), "has the type 4, which is unknown"),
    "tensor type 2^32-1": Case(tensor(type_id=2**32 - 1), "which is unknown"),
    "row not a multiple of the block": Case(
        tensor(dims=(48, 2), type_id=8), "rows of 48 elements, which Q8_0 blocks of 32 do not"
    ),
    "row smaller than a block": Case(tensor(dims=(32, 8), type_id=12), "Q4_K blocks of 256"),
    # Where the bytes are: a tensor beyond the file reads foreign memory (CVE-2026-7482)
    "offset not aligned": Case(tensor(dims=(8,), offset=8), "starts at 8, no multiple of 32"),
    "tensor one byte beyond the file": Case(RawFile(data=bytes(255)).build(), "ends at byte"),
    "offset beyond the file": Case(tensor(offset=1 << 20), "but the file has only"),
    "offset wraps around 2^64": Case(tensor(offset=2**64 - 32), "but the file has only"),
    "tensors overlap": Case(
        RawFile(tensors=[RawTensor(), RawTensor(name=b"b", dims=(8,), offset=224)]).build(),
        "tensors 'a.weight' and 'b' overlap",
    ),
    "tensors at the same place": Case(
        RawFile(tensors=[RawTensor(), RawTensor(name=b"b")]).build(), "overlap"
    ),
    "no tensor data at all": Case(RawFile(data=b"").build(), "ends at byte"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_known_fault_is_a_named_error(tmp_path, name):
    """The fault is found, named, located, has a fix, and costs no memory worth speaking of."""
    case = CASES[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(case.content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=re.escape(case.says)) as caught:
            open_model_file(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    assert error.path == str(path)
    assert error.fix
    assert error.offset is not None
    assert 0 <= error.offset <= len(case.content)
    assert case.offset in (None, error.offset)
    assert peak_bytes < 10 * len(case.content) + (256 << 10)


def test_the_file_that_the_cases_are_made_from_is_valid(tmp_path):
    """Without its one fault each file would open, so that the fault is what was found."""
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    with open_model_file(path) as model:
        assert model.view("a.weight").tobytes() == bytes(range(256))


def test_names_from_the_file_are_quoted_in_messages(tmp_path):
    """Control characters in a file can not forge lines of a log, and long keys are cut."""
    path = tmp_path / "log.gguf"
    key = b"a\r\nERROR forged \x1b[31m" + b"x" * 1000
    path.write_bytes(field(b"\x02", type_id=BOOL, key=key))
    with pytest.raises(ModelFileError) as caught:
        open_model_file(path)
    message = str(caught.value).replace(str(tmp_path), "")
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.slow
def test_truncation_at_every_header_byte_is_an_error(tmp_path):
    """A file cut anywhere in its header, or in its padding or data, never opens."""
    raw = RawFile(
        fields=[
            ARCH,
            RawField(b"strings", ARRAY, array_of(STRING, text(b"") + text("häß".encode()), 2)),
            RawField(b"ints", ARRAY, array_of(INT32, u32(7) * 3, 3)),
            RawField(b"yes", BOOL, b"\x01"),
            RawField(b"size", UINT64, u64(5)),
        ],
        tensors=[RawTensor(), RawTensor(name=b"b", dims=(256,), type_id=12, offset=256)],
        data=bytes(256 + 144),
    )
    content = raw.build()
    path = tmp_path / "cut.gguf"
    data_points = range(raw.header_bytes(), len(content), max(1, len(raw.data) // 200))
    assert len(data_points) >= 200
    for size in (*range(1, raw.header_bytes()), *data_points):
        path.write_bytes(content[:size])
        with pytest.raises(ModelFileError):
            open_model_file(path)
    path.write_bytes(content)
    open_model_file(path).close()


def test_arrays_of_arrays_are_read(tmp_path):
    """No model needs one, and files may carry them: of any depth up to the limit, empty ones among them."""
    inner = array_of(UINT8, b"\x01\x02", 2)
    texts = array_of(STRING, text(b"a") + text("\u00e9".encode()), 2)
    deep = array_of(ARRAY, u32(ARRAY) + u64(2) + inner + texts + array_of(UINT8, b"", 0), 2)
    path = tmp_path / "nested.gguf"
    path.write_bytes(field(deep, type_id=ARRAY))
    with open_model_file(path) as model:
        assert model.metadata.raw("k") == (((1, 2), ("a", "\u00e9")), ())
