"""Device code of attention over the block cache: tiles of positions, read through block tables, with a running softmax.

Query heads that share a key head are rows of one tile, so that keys and values are loaded once for all of them. A key's
numbers beyond as many as a value has, `rest_width` wide or less, are multiplied apart. In a latent cache a value is the
first numbers of its key, and one load serves as both. How much of the context there is, is read on the device. Knows no launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of the step's array, whose parts lie at any address: one compiled kernel serves all.
NUMBERS = ("positions_ptr", "firsts_ptr", "tables_ptr", "sequence_stride", "block_stride")


@triton.jit
def _load(
    numbers_ptr: tl.tensor,
    units_ptr: tl.tensor,
    rows: tl.tensor,
    there: tl.tensor,
    head_dim: tl.constexpr,
    first: tl.constexpr,
    end: tl.constexpr,
    width: tl.constexpr,
    is_quantised: tl.constexpr,
    operand: tl.constexpr,
) -> tl.tensor:
    """Return [n, width] of the numbers [first, end) of these rows of a cache whose rows have head_dim of them.

    Zeros where nothing is `there`.
    """
    column = first + tl.arange(0, width)
    live = there[:, None] & (column < end)[None, :]
    x = tl.load(numbers_ptr + rows[:, None] * head_dim + column[None, :], mask=live, other=0)
    if is_quantised:
        at = units_ptr + rows[:, None] * (head_dim // 32) + (column // 32)[None, :]
        wide = x.to(tl.float32) * tl.load(at, mask=live, other=0).to(tl.float32)
        x = tl.minimum(tl.maximum(wide, -65504.0), 65504.0)
    return x.to(operand)


@triton.jit
def _queries(
    q_ptr: tl.tensor,
    heads: tl.tensor,
    live: tl.tensor,
    head_dim: tl.constexpr,
    first: tl.constexpr,
    end: tl.constexpr,
    width: tl.constexpr,
    operand: tl.constexpr,
) -> tl.tensor:
    """Return [n, width] of the numbers [first, end) of these heads' queries."""
    column = first + tl.arange(0, width)
    wanted = live[:, None] & (column < end)[None, :]
    at = q_ptr + heads[:, None] * head_dim + column[None, :]
    return tl.load(at, mask=wanted, other=0.0).to(operand)


@triton.jit
def _first_seen(position: tl.tensor, window: tl.constexpr, chunked: tl.constexpr) -> tl.tensor:
    """Return the first position that tokens at these see, where there is a window; maybe one below 0."""
    return position // window * window if chunked else position - window + 1


@triton.jit
def _attend(
    q: tl.tensor,
    rest: tl.tensor,
    mine: tl.tensor,
    caches: tl.tuple,
    table_ptr: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    head: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    is_latent: tl.constexpr,
    is_quantised: tl.constexpr,
    positions: tl.constexpr,
    precision: tl.constexpr,
) -> tl.tuple:
    """Return sums [rows, width], largest scores and sums of weights [rows] of the table's positions begin..end.

    q: [rows, width], the first numbers of queries, as many as a value has; rest: [rows, rest_width], those behind them,
    if there are some. mine: the rows' positions. caches: keys and their units, values and theirs. first: the position of the table's
    first token. Scores are in powers of two.
    """
    front: tl.constexpr = value_dim if value_dim < head_dim else head_dim
    operand: tl.constexpr = q.dtype
    width: tl.constexpr = q.shape[1]
    sums = tl.zeros((q.shape[0], width), tl.float32)
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    for start in tl.range(begin, end, positions):
        at = start + tl.arange(0, positions)
        there = at < end
        block = tl.load(table_ptr + (at // block_tokens) * block_stride, mask=there, other=0)
        rows = (block.to(tl.int64) * block_tokens + at % block_tokens) * kv_heads + head
        keys = _load(
            caches[0],
            caches[1],
            rows,
            there,
            head_dim,
            0,
            front,
            width,
            is_quantised,
            operand,
        )
        scores = tl.dot(q, tl.trans(keys), input_precision=precision)
        if front < head_dim:
            behind = _load(
                caches[0],
                caches[1],
                rows,
                there,
                head_dim,
                front,
                head_dim,
                rest.shape[1],
                is_quantised,
                operand,
            )
            scores = tl.dot(rest, tl.trans(behind), scores, input_precision=precision)
        scores *= scale
        position = first + at
        seen = there[None, :] & (position[None, :] <= mine[:, None])
        if window:
            seen = seen & (position[None, :] >= _first_seen(mine, window, chunked)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet would take infinity from infinity.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        if is_latent:
            values = keys
        else:
            values = _load(
                caches[2],
                caches[3],
                rows,
                there,
                value_dim,
                0,
                value_dim,
                width,
                is_quantised,
                operand,
            )
        sums = tl.dot(weights.to(operand), values, sums * kept[:, None], input_precision=precision)
        top = higher
    return sums, top, total


@triton.jit(do_not_specialize=(*NUMBERS, "length"))
def attend_tiles_kernel(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    key_units_ptr: tl.tensor,
    values_ptr: tl.tensor,
    value_units_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sequence_stride: tl.tensor,
    block_stride: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    rest_width: tl.constexpr,
    block_tokens: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    is_latent: tl.constexpr,
    is_quantised: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    positions: tl.constexpr,
    has_sinks: tl.constexpr,
) -> None:
    """A program: `block_rows` rows of one sequence and one key head, where rows are tokens times heads that share it.

    Programs with the longest context start first. sinks_ptr: a number per head, in powers of two, if `has_sinks`.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tile * block_rows + tl.arange(0, block_rows)
    token = row // group
    live = token < length
    token = sequence * length + token
    mine = tl.load(positions_ptr + token, mask=live, other=-1).to(tl.int32)
    first = tl.load(firsts_ptr + sequence).to(tl.int32)
    end = tl.max(mine, 0) + 1 - first
    begin = 0
    if window:
        lowest = tl.min(tl.where(live, mine, 0x7FFFFFFF), 0)
        begin = tl.maximum(_first_seen(lowest, window, chunked) - first, 0)
    heads = (token * kv_heads + head) * group + row % group
    front: tl.constexpr = value_dim if value_dim < head_dim else head_dim
    q = _queries(q_ptr, heads, live, head_dim, 0, front, width, operand)
    rest = q
    if front < head_dim:
        rest = _queries(q_ptr, heads, live, head_dim, front, head_dim, rest_width, operand)
    sums, top, total = _attend(
        q,
        rest,
        mine,
        (keys_ptr, key_units_ptr, values_ptr, value_units_ptr),
        tables_ptr + sequence * sequence_stride,
        first,
        begin,
        end,
        block_stride,
        scale,
        head,
        kv_heads,
        head_dim,
        value_dim,
        block_tokens,
        window,
        chunked,
        is_latent,
        is_quantised,
        positions,
        precision,
    )
    if has_sinks:
        sink = tl.load(sinks_ptr + head * group + row % group)
        higher = tl.maximum(top, sink)
        kept = tl.exp2(top - higher)
        total = total * kept + tl.exp2(sink - higher)
        sums *= kept[:, None]
    total = tl.where(total == 0.0, 1.0, total)
    column = tl.arange(0, width)
    wanted = live[:, None] & (column < value_dim)[None, :]
    at = heads[:, None] * value_dim + column[None, :]
    tl.store(out_ptr + at, sums / total[:, None], mask=wanted)


@triton.jit
def _split(
    position: tl.tensor,
    first: tl.tensor,
    window: tl.constexpr,
    chunked: tl.constexpr,
    positions: tl.constexpr,
    num_splits: tl.constexpr,
) -> tl.tuple:
    """Return where a row's context begins and ends in its table, and the positions of a split: whole tiles."""
    end = position + 1 - first
    begin = position * 0
    if window:
        begin = tl.maximum(_first_seen(position, window, chunked) - first, 0)
    tiles = (end - begin + (positions - 1)) // positions
    return begin, end, (tiles + (num_splits - 1)) // num_splits * positions


@triton.jit(do_not_specialize=NUMBERS)
def attend_splits_kernel(
    sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    key_units_ptr: tl.tensor,
    values_ptr: tl.tensor,
    value_units_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sequence_stride: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    rest_width: tl.constexpr,
    block_tokens: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    is_latent: tl.constexpr,
    is_quantised: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    positions: tl.constexpr,
    num_splits: tl.constexpr,
) -> None:
    """A program: one split of one sequence's context, for one token and `block_rows` heads that share one key head.

    Stores sums [heads, splits, value_dim], and the largest score and the sum of weights [heads, splits, 2]; nothing for
    a split without positions.
    """
    num_tiles: tl.constexpr = (group + block_rows - 1) // block_rows
    split, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, tile = tl.program_id(1) // num_tiles, tl.program_id(1) % num_tiles
    position = tl.load(positions_ptr + sequence).to(tl.int32)
    first = tl.load(firsts_ptr + sequence).to(tl.int32)
    begin, end, size = _split(position, first, window, chunked, positions, num_splits)
    begin += split * size
    end = tl.minimum(begin + size, end)
    if begin >= end:
        return
    row, column = tile * block_rows + tl.arange(0, block_rows), tl.arange(0, width)
    live = row < group
    heads = (sequence * kv_heads + head) * group + row
    front: tl.constexpr = value_dim if value_dim < head_dim else head_dim
    q = _queries(q_ptr, heads, live, head_dim, 0, front, width, operand)
    rest = q
    if front < head_dim:
        rest = _queries(q_ptr, heads, live, head_dim, front, head_dim, rest_width, operand)
    sums, top, total = _attend(
        q,
        rest,
        position + row * 0,
        (keys_ptr, key_units_ptr, values_ptr, value_units_ptr),
        tables_ptr + sequence * sequence_stride,
        first,
        begin,
        end,
        block_stride,
        scale,
        head,
        kv_heads,
        head_dim,
        value_dim,
        block_tokens,
        window,
        chunked,
        is_latent,
        is_quantised,
        positions,
        precision,
    )
    place = heads * num_splits + split
    wanted = live[:, None] & (column < value_dim)[None, :]
    tl.store(sums_ptr + place[:, None] * value_dim + column[None, :], sums, mask=wanted)
    tl.store(tops_ptr + place * 2, top, mask=live)
    tl.store(tops_ptr + place * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=("positions_ptr", "firsts_ptr"))
def merge_splits_kernel(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_heads: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    positions: tl.constexpr,
    num_splits: tl.constexpr,
    has_sinks: tl.constexpr,
) -> None:
    """A program: one head of one token; adds up what the splits found. A context without positions gives zeros.

    sinks_ptr: a number per head, in powers of two, if `has_sinks`.
    """
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions_ptr + sequence).to(tl.int32)
    first = tl.load(firsts_ptr + sequence).to(tl.int32)
    begin, end, size = _split(position, first, window, chunked, positions, num_splits)
    split, column = tl.arange(0, num_splits), tl.arange(0, width)
    live = begin + split * size < end
    place = (sequence * num_heads + head) * num_splits + split
    top = tl.load(tops_ptr + place * 2, mask=live, other=float("-inf"))
    total = tl.load(tops_ptr + place * 2 + 1, mask=live, other=0.0)
    highest = tl.max(top, 0)
    of_sink = 0.0
    if has_sinks:
        sink = tl.load(sinks_ptr + head)
        highest = tl.maximum(highest, sink)
        of_sink = tl.exp2(sink - highest)
    share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    wanted = live[:, None] & (column < value_dim)[None, :]
    at = sums_ptr + place[:, None] * value_dim + column[None, :]
    sums = tl.sum(tl.load(at, mask=wanted, other=0.0) * share[:, None], 0)
    total = tl.sum(total * share, 0) + of_sink
    out = out_ptr + (sequence * num_heads + head) * value_dim + column
    tl.store(out, sums / tl.where(total == 0.0, 1.0, total), mask=column < value_dim)
