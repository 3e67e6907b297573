"""Writes some layers of a published model with random weights: `python -m benchmarks.published_models.random_gguf NAME
OUT.gguf --layers N`.

Shapes, metadata and types are the published model's; blocks come from a pool of quantised noise. Knows no architecture:
what a tensor is drawn from depends on its name alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import numpy as np

from benchmarks.published_models.shape import Mix
from benchmarks.published_models.sparse_gguf import write_sparse
from benchmarks.published_models.table import MODELS
from benchmarks.synthetic_blocks import UNIT, Bytes, WeightSource
from thermocline.modelfile.reader import open_model_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.published_models.shape import PublishedModel
    from thermocline.modelfile.layout import TensorInfo

_CONSTANTS: Final = (
    ("norm.weight", 1.0),
    ("norm_1.weight", 1.0),
    ("norm_2.weight", 1.0),
    ("_scale.weight", 1.0),
    (".scale", 1.0),
    ("rope_freqs.weight", 1.0),
    ("ssm_a", -0.1),
    ("ssm_d", 1.0),
)
"""Ends of names, and the one number that such tensors hold."""
_SMALL: Final = 0.05
"""Deviation of biases, sinks and the like."""


def write_random(
    path: Path,
    model: PublishedModel,
    *,
    layers: int,
    mix: Mix = "Q4_K_M",
    seed: int = 7,
    vocabulary: int | None = None,
    has_block: bool = False,
) -> Path:
    """Write the first `layers` layers of the model, with random weights, and return the path. Equal arguments give equal bytes.

    vocabulary: its number of tokens, where not the model's. has_block: with the block that guesses a further token.
    """
    shape = replace(model.shape, layers=layers, mtp_blocks=model.shape.mtp_blocks * has_block)
    source, partial = WeightSource(seed), path.with_name(path.name + ".partial")
    tokens = model.vocabulary if vocabulary is None else model.vocabulary.cut(vocabulary)
    write_sparse(partial, replace(model, shape=shape, vocabulary=tokens), mix)
    with open_model_file(partial) as file:
        tensors = tuple(file.tensors.values())
    with partial.open("r+b") as out:
        for tensor in tensors:
            out.seek(tensor.offset)
            for piece in _content(tensor, source):
                out.write(piece.data)
    partial.rename(path)
    return path


def _content(tensor: TensorInfo, source: WeightSource) -> Iterator[Bytes]:
    """Yield a tensor's bytes in pieces."""
    for end, number in _CONSTANTS:
        if tensor.name.endswith(end):
            yield np.full(math.prod(tensor.shape), number, np.float32).view(np.uint8)
            return
    is_matrix = tensor.name.endswith(".weight") and len(tensor.shape) > 1
    # A row of the embedding is one token's hidden state; every other row is summed over its numbers.
    fan_in = 1 if tensor.name == "token_embd.weight" else tensor.shape[-1]
    deviation = fan_in**-0.5 if is_matrix else _SMALL
    count, left = math.prod(tensor.shape), tensor.nbytes
    whole = count + -count % UNIT
    for piece in source.chunks(tensor.name, tensor.format, whole, deviation):
        yield piece[:left]
        left -= min(left, piece.size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_models.random_gguf", description=__doc__
    )
    parser.add_argument("name", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--layers", type=int, default=8, metavar="N")
    parser.add_argument("--mix", choices=get_args(Mix), default="Q4_K_M")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, metavar="N", help="so many tokens only")
    parser.add_argument("--block", action="store_true", help="with the block that drafts")
    options = parser.parse_args(arguments)
    path = write_random(
        options.out,
        MODELS[options.name],
        layers=options.layers,
        mix=options.mix,
        seed=options.seed,
        vocabulary=options.vocabulary,
        has_block=options.block,
    )
    print(f"{path}: {Path(path).stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
