"""Breaks GGUF files at random, knowing where their numbers are; knows nothing of the reader.

The same seed gives the same files on every machine.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tests.support.gguf_files import (
    ARRAY,
    BOOL,
    FLOAT32,
    FLOAT64,
    INT8,
    INT32,
    STRING,
    UINT8,
    UINT16,
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

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from tests.support.gguf_files import Mark

# Numbers at which size computations go wrong.
INTERESTING = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33, 64, 255, 256, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**42 + 1, 2**58 + 1, 2**61, 2**62),
    *(2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1),
)


def base_files() -> list[RawFile]:
    """Return the valid files from which mutants are made: all value types, several formats."""
    architecture = RawField(b"general.architecture", STRING, text(b"toy"))
    strings = b"".join(text(f"tok\u00e9n{index}".encode()) for index in range(40))
    every_type = RawFile(
        fields=[
            architecture,
            RawField(b"general.alignment", UINT32, u32(32)),
            RawField(b"u8", UINT8, b"\x07"),
            RawField(b"i8", INT8, b"\xf0"),
            RawField(b"u16", UINT16, b"\x01\x02"),
            RawField(b"f32", FLOAT32, u32(0x3F800000)),
            RawField(b"f64", FLOAT64, u64(0x3FF0000000000000)),
            RawField(b"flag", BOOL, b"\x01"),
            RawField(b"u64", UINT64, u64(2**40)),
            RawField(b"tokens", ARRAY, array_of(STRING, strings, 40)),
            RawField(b"types", ARRAY, array_of(INT32, u32(1) * 40, 40)),
            RawField(b"flags", ARRAY, array_of(BOOL, b"\x01\x00" * 4, 8)),
            RawField(b"empty", ARRAY, array_of(UINT8, b"", 0)),
        ],
        tensors=[
            RawTensor(name=b"blk.0.norm.weight", dims=(24,), offset=0),
            RawTensor(name=b"blk.0.up.weight", dims=(256, 2), type_id=12, offset=96),
            RawTensor(name=b"blk.0.exps.weight", dims=(32, 3, 2), type_id=8, offset=384),
        ],
        data=bytes(i * 7 % 256 for i in range(384 + 204)),
    )
    plain = RawFile(fields=[architecture], tensors=[RawTensor(), RawTensor(b"b", (8,), 0, 256)])
    plain.data = bytes(288)
    vocabulary = RawFile(fields=every_type.fields, tensors=[], data=b"", version=2)
    return [every_type, plain, vocabulary]


def mutants(random: Random) -> Iterator[bytes]:
    """Yield broken files without end: two of three by structure, one of three byte by byte."""
    bases = [base.build_marked() for base in base_files()]
    for index in itertools.count():
        content, marks = bases[random.randrange(len(bases))]
        broken = bytearray(content)
        if index % 3:
            for _ in range(random.choice((1, 1, 1, 2, 3))):
                _break_number(broken, random.choice(marks), random)
        else:
            _break_bytes(broken, random)
        if random.random() < 0.1:
            del broken[random.randrange(len(broken) + 1) :]
        yield bytes(broken) or b"\x00"


def _break_number(content: bytearray, mark: Mark, random: Random) -> None:
    """Overwrite one number of the header: with an interesting one, a near one, or a random one."""
    place = slice(mark.offset, mark.offset + mark.num_bytes)
    old = int.from_bytes(content[place], "little")
    new = random.choice(
        (
            random.choice(INTERESTING),
            old + random.choice((-33, -32, -8, -1, 1, 8, 32, 33)),
            random.getrandbits(random.randrange(1, 65)),
        )
    )
    content[place] = (new % (1 << (8 * mark.num_bytes))).to_bytes(mark.num_bytes, "little")


def _break_bytes(content: bytearray, random: Random) -> None:
    """Change, drop, repeat or insert bytes."""
    start = random.randrange(len(content))
    length = random.randrange(1, 33)
    match random.randrange(5):
        case 0 | 1:
            for _ in range(random.randrange(1, 9)):
                content[random.randrange(len(content))] = random.getrandbits(8)
        case 2:
            del content[start : start + length]
        case 3:
            content[start:start] = content[start : start + length]
        case _:
            content[start:start] = random.randbytes(length)
