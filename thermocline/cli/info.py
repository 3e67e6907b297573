"""`thermocline info`: what is in a model file, from its header alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import click

from thermocline.cli.console import echo_json, show
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import json_option, model_argument
from thermocline.cli.session import model_path
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.modelfile.shards import ARCHITECTURE_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.cache_format import HeadShape
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.attention_specs import EntriesSpec
    from thermocline.models.footprint import Footprint
    from thermocline.models.sizes import ModelSizes
    from thermocline.models.spec import ModelSpec

# Of the request whose cache is priced, unless the model takes fewer.
_CACHED_TOKENS: Final = 32768


@click.command()
@model_argument()
@hub_model(header_is_enough=True)
@json_option
def info(model: str | None, as_json: bool) -> None:
    """Show what a model is, its sizes, and what one token costs.

    \b
    Examples:
      thermocline info
      thermocline info model.gguf
      thermocline info -hf ORG/REPO:Q4_K_M      before it is downloaded
      thermocline info model.gguf --json

    Reads the header of the file only, so it is quick whatever the size. For a file that thermocline
    can not run, says everything that is in the way.
    """
    from thermocline.modelfile.reader import open_model_file

    with open_model_file(model_path(model), any_format=True) as file:
        facts = inspect(file)
        if as_json:
            echo_json(_as_json(file, facts))
        else:
            _show(file, facts)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a file; `spec` is None where its architecture is not supported."""

    spec: ModelSpec | None
    footprint: Footprint
    sizes: ModelSizes | None
    tokenizer: str
    has_chat_template: bool
    unsupported: tuple[str, ...]
    fixes: tuple[str, ...]
    """What can be done about it."""
    block_bytes: int = 0
    """Of blocks after the trunk, which guess further tokens."""
    why_no_drafts: str = ""
    """Why speculation can not use these; "" where it can, and where there are none."""

    @property
    def num_predict_layers(self) -> int:
        """Blocks that guess further tokens."""
        return 0 if self.spec is None else self.spec.num_predict_layers


def inspect(file: ModelFile) -> ModelFacts:
    """Read the facts of an open file, also of one that is no model that runs here."""
    from thermocline.kernels.cache_format import CacheType
    from thermocline.kernels.reference import ReferenceKernels
    from thermocline.kernels.weight import SUPPORTED_FORMATS
    from thermocline.models.footprint import decoder_tensors, measure_footprint
    from thermocline.models.registry import open_model, read_spec
    from thermocline.models.sizes import measure_sizes
    from thermocline.text.vocabulary import TokenizerData

    unsupported: list[str] = []
    fixes: list[str] = []

    def passes(check: Callable[[], object]) -> bool:
        try:
            check()
        except UnsupportedModelError as error:
            unsupported.extend(f"{error.what}: {thing}" for thing in error.unsupported)
            fixes.append(error.fix)
            return False
        except ModelFileError as error:
            unsupported.append(error.what)
            fixes.append(error.fix)
            return False
        return True

    metadata = file.metadata
    is_known = passes(lambda: read_spec(file))
    spec = read_spec(file) if is_known else None
    tables = () if spec is None else spec.expert_tables
    has_formats = passes(lambda: file.require_formats(SUPPORTED_FORMATS, but_for=tables))
    if is_known:
        passes(lambda: TokenizerData.from_metadata(metadata, path=file.path))
        if has_formats:
            passes(lambda: open_model(file, ReferenceKernels()))
    names = (
        metadata.get_str("tokenizer.ggml.model", default="none"),
        metadata.get_str("tokenizer.ggml.pre", default=""),
    )
    tensors = every = tuple(file.tensors.values())
    if spec is not None:
        tensors = decoder_tensors(tensors, spec.num_layers)
    return ModelFacts(
        spec=spec,
        footprint=measure_footprint(tensors, None if spec is None else spec.router),
        sizes=None if spec is None else measure_sizes(tensors, spec, CacheType.F16),
        tokenizer=", ".join(filter(None, names)),
        has_chat_template="tokenizer.chat_template" in metadata,
        unsupported=tuple(unsupported),
        fixes=tuple(dict.fromkeys(fixes)),
        block_bytes=sum(tensor.nbytes for tensor in every)
        - sum(tensor.nbytes for tensor in tensors),
        why_no_drafts=_why_no_drafts(file, spec) if spec is not None and has_formats else "",
    )


def _why_no_drafts(file: ModelFile, spec: ModelSpec) -> str:
    from thermocline.kernels.reference import ReferenceKernels
    from thermocline.models.registry import open_next_blocks

    if not spec.num_predict_layers:
        return ""
    try:
        open_next_blocks(file, ReferenceKernels())
    except UnsupportedModelError as error:
        return f"{error.what}: {', '.join(error.unsupported)}"
    except ModelFileError as error:
        return error.what
    return ""


def _as_json(file: ModelFile, facts: ModelFacts) -> dict[str, object]:
    spec, cache = None, None
    if facts.spec is not None and facts.sizes is not None:
        spec = asdict(facts.spec)
        num_tokens = _cached_tokens(facts.spec)
        cache = {"tokens": num_tokens, "f16_bytes": facts.sizes.kv(num_tokens)}
    return {
        "path": file.path,
        "num_files": file.num_shards,
        "architecture": _architecture(file),
        "supported": not facts.unsupported,
        "unsupported": list(facts.unsupported),
        "fixes": list(facts.fixes),
        "spec": spec,
        "footprint": asdict(facts.footprint),
        "next_token_blocks": {
            "count": facts.num_predict_layers,
            "bytes": facts.block_bytes,
            "why_not_used": facts.why_no_drafts,
        },
        "cache": cache,
        "tokenizer": facts.tokenizer,
        "has_chat_template": facts.has_chat_template,
    }


def _show(file: ModelFile, facts: ModelFacts) -> None:
    from thermocline.cli.render import facts_table, formats_table

    rows = [("architecture", _architecture(file) or "not named")]
    rows += _size_rows(facts.footprint)
    if facts.spec is not None and facts.sizes is not None:
        rows += _shape_rows(facts.spec)
        if facts.num_predict_layers:
            rows.append(_block_row(facts))
        rows.append(("a request's cache", _cache_row(facts.spec, facts.sizes)))
    else:
        rows += _stated_rows(file)
    if file.num_shards > 1:
        rows.append(("files", str(file.num_shards)))
    rows.append(("tokenizer", facts.tokenizer))
    rows.append(("chat template", "yes" if facts.has_chat_template else "no"))
    rows.append(("runs here", "no" if facts.unsupported else "yes"))
    rows += [("not supported", reason) for reason in facts.unsupported]
    rows += [("what can be done", fix) for fix in facts.fixes]
    title = file.path if facts.spec is None else f"{facts.spec.name} ({file.path})"
    show(facts_table(title, rows), "", formats_table(facts.footprint.formats))


def _architecture(file: ModelFile) -> str:
    return file.metadata.get_str(ARCHITECTURE_KEY, default="")


def _stated_rows(file: ModelFile) -> list[tuple[str, str]]:
    """What a file says of itself in the keys that most architectures have, unchecked."""
    arch, rows = _architecture(file), [("tensors", str(len(file.tensors)))]
    for label, key in (
        ("name", "general.name"),
        ("kind", "general.type"),
        ("layers", f"{arch}.block_count"),
        ("width", f"{arch}.embedding_length"),
        ("context", f"{arch}.context_length"),
        ("experts", f"{arch}.expert_count"),
    ):
        if key in file.metadata and not file.metadata.is_array(key):
            rows.append((label, str(file.metadata.raw(key))))
    return rows


def _size_rows(footprint: Footprint) -> list[tuple[str, str]]:
    from thermocline.units import format_bytes

    parameters = _millions(footprint.num_parameters)
    if footprint.num_active_parameters is not None:
        parameters += f", {_millions(footprint.num_active_parameters)} used by a token"
    rows = [
        ("parameters", parameters),
        ("size", format_bytes(footprint.total_bytes)),
        ("- trunk", f"{format_bytes(footprint.trunk_bytes)}, read for every token"),
    ]
    if footprint.experts_bytes:
        rows.append(("- routed experts", format_bytes(footprint.experts_bytes)))
    if footprint.shared_bytes:
        shared = f"{format_bytes(footprint.shared_bytes)}, part of the trunk"
        rows.insert(3, ("- shared experts", shared))
    if footprint.ngram_bytes:
        rows.append(
            ("- n-grams", f"{format_bytes(footprint.ngram_bytes)}, a token takes a few rows")
        )
    if footprint.token_bytes is not None:
        rows.append(("one token reads", f"{format_bytes(footprint.token_bytes)} at least"))
    return rows


def _shape_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    router = spec.router
    experts = (
        f"{router.num_experts} per layer, "
        f"{_range(router.own_used, router.num_experts_used)} used by a token, "
        f"of width {_range(spec.own_expert_sizes, spec.expert_intermediate_size)}"
    )
    if not spec.has_experts:
        width = _range(spec.own_feed_forward_sizes, spec.dense_intermediate_size)
        experts = f"none: every layer is dense, of width {width}"
    if spec.shared_intermediate_size:
        experts += f"; one of width {spec.shared_intermediate_size} used by all"
    return [
        ("layers", f"{spec.num_layers} of width {spec.hidden_size}{_streams(spec)}"),
        *_layer_rows(spec),
        ("experts", experts),
        ("attention", _attention(spec)),
        ("vocabulary", f"{spec.vocab_size} tokens"),
        ("context", f"{spec.context_length} tokens"),
        ("embeddings", _embedding_row(spec)),
    ]


def _streams(spec: ModelSpec) -> str:
    return "" if spec.streams is None else f", {spec.streams.count} residual streams"


def _range(by_layer: tuple[int, ...], everyone: int) -> str:
    """Return the least and the most of what layers have, or what all have."""
    found = [count for count in by_layer if count]
    return f"{min(found)} to {max(found)}" if found else str(everyone)


def _embedding_row(spec: ModelSpec) -> str:
    from thermocline.messages import Pooling

    if spec.num_scores:
        return f"none: it scores documents, {spec.num_scores} outputs (/v1/rerank)"
    ways = {
        Pooling.MEAN: "the mean of all tokens' states",
        Pooling.CLS: "the first token's state",
        Pooling.LAST: "the last token's state",
    }
    if spec.pooling not in ways:
        return "none: the file scores how well two texts fit"
    why = "as the file says" if spec.own_pooling else "the file names no way"
    return f"{spec.hidden_size} numbers, {ways[spec.pooling]} ({why})"


def _attention(spec: ModelSpec) -> str:
    """Return the heads; where kinds of layers have different ones, each kind's."""
    from thermocline.models.spec import LayerKind

    heads = f"{spec.num_heads} heads"
    if len(set(spec.layer_heads)) > 1:
        heads = f"{min(spec.layer_heads)} to {spec.num_heads} heads"
    reads = "" if spec.indexer is None else f"; a token reads {spec.indexer.most_read} positions"
    one_row = f"one row of {spec.head_dim} numbers per token for all"
    if spec.latent is not None:
        near = None if spec.window is None else spec.window.latent
        windows = "" if near is None else f"; in windows of {near.key_dim}, one row of {near.row}"
        return f"{heads} of {spec.latent.key_dim}, {one_row}{reads}{windows}"
    if spec.entries is not None:
        return f"{heads} of {spec.head_dim}, {one_row}"
    kinds = dict(zip(spec.layer_kinds, spec.kv_shapes, strict=True))
    kinds = {kind: of for kind, of in kinds.items() if kind is not LayerKind.RECURRENT}
    rows = {
        kind: f"{heads} of {of.head_dim}, {of.kv_heads} for keys and values{_value_size(of)}"
        for kind, of in kinds.items()
    }
    if len(set(rows.values())) < 2:
        return next(iter(rows.values()), "none") + reads
    return "; ".join(f"{row} ({kind})" for kind, row in rows.items())


def _entries(entries: EntriesSpec, ratio: int) -> str:
    """Which layers read rows that are each made of many tokens' behind the window."""
    layers = [n for n, own in enumerate(entries.ratios) if own == ratio]
    chosen = f", of which a token reads {entries.most_read}" if entries.is_chosen(layers[0]) else ""
    where = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
    return f"one for {ratio} tokens in {where}{chosen}"


def _value_size(heads: HeadShape) -> str:
    return "" if heads.value_dim == heads.head_dim else f", values of {heads.value_dim}"


def _cached_tokens(spec: ModelSpec) -> int:
    return min(spec.context_length, _CACHED_TOKENS)


def _cache_row(spec: ModelSpec, sizes: ModelSizes) -> str:
    """What a long request takes, the windows' share kept down to what is seen and in flight."""
    from thermocline.units import format_bytes

    num_tokens = _cached_tokens(spec)
    row = f"{format_bytes(sizes.kv(num_tokens))} for {num_tokens} tokens in f16"
    kept = next((layer.max_kv_tokens for layer in sizes.layers if layer.max_kv_tokens), num_tokens)
    if kept < num_tokens:
        row += f", {kept} in windows"
    return row


def _block_row(facts: ModelFacts) -> tuple[str, str]:
    """Whether blocks behind the last layer are of use, and what they take besides."""
    from thermocline.units import format_bytes

    count = facts.num_predict_layers
    what = "1 block guesses" if count == 1 else f"{count} blocks guess"
    use = f"not used: {facts.why_no_drafts}" if facts.why_no_drafts else "for --speculate mtp"
    return "further tokens", f"{what} them, {format_bytes(facts.block_bytes)}, {use}"


def _layer_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    """What layers that are not like the others remember, and what they lack."""
    from thermocline.models.spec import LayerKind
    from thermocline.units import format_bytes

    rows = []
    kinds = Counter(spec.layer_kinds)
    if spec.window is not None:
        size = spec.window.num_tokens
        back = f"their chunk of {size} tokens" if spec.window.chunked else f"{size} tokens back"
        near = f"{kinds[LayerKind.WINDOW]} layers see {back}"
        rows.append(("- windows", f"{near}, {kinds[LayerKind.ATTENTION]} see all"))
    if spec.entries is not None:
        rows.append(("- windows", f"{spec.entries.window} tokens in all layers"))
        rows += [
            ("- entries", _entries(spec.entries, r)) for r in sorted({*spec.entries.ratios} - {0})
        ]
    if spec.has_states:
        rows.append(("- keys and values", f"in {kinds[LayerKind.ATTENTION]} layers"))
        rows.append(
            (
                "- recurrent state",
                f"in {len(spec.layers_with_states)} layers, {format_bytes(spec.sequence_state_bytes)} per request",
            )
        )
    if spec.kv_sources:
        kept, read = spec.num_layers - len(spec.keyless_layers), len(set(spec.kv_sources.values()))
        keys = (
            f"in the first {kept} layers; {len(spec.kv_sources)} others attend to those of {read}"
        )
        rows.append(("- keys and values", keys))
    if spec.layer_embedding_size:
        per_layer = f"{spec.layer_embedding_size} numbers of each token, of which one row is read"
        rows.append(("- embeddings of each layer", per_layer))
    if LayerKind.NONE in kinds:
        rows.append(("- feed-forward alone", f"{kinds[LayerKind.NONE]} layers"))
    if spec.own_dense_layers:
        rows.append(("- without experts", f"{len(spec.own_dense_layers)} layers"))
    elif spec.num_dense_layers and spec.has_experts:
        rows.append(("- dense layers", f"the first {spec.num_dense_layers}, without experts"))
    return rows


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
