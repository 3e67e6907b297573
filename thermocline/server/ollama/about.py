"""Ollama's bodies about the models of the server: tags, show, ps. Pure."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from thermocline.server.core.keep_alive import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.experts.placement.allocation import DeviceAllocation
    from thermocline.models.spec import ModelSpec
    from thermocline.server.core.bodies import JsonObject
    from thermocline.server.core.place import ModelState
    from thermocline.text.tool_calls.tool_formats import TemplateFacts

INTERFACE_VERSION: Final = "0.12.0"
"""The version of Ollama whose interface this is; clients read it to know which fields they may send."""

_NEVER: Final = "9999-12-31T23:59:59Z"
# From the largest down; the first unit that is not above the count is used.
_UNITS: Final = ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, ""))


@dataclass(frozen=True, slots=True)
class ShownFacts:
    """What a file says of its model: dimensions, and what its chat template tells."""

    spec: ModelSpec
    template: TemplateFacts


def iso_time(seconds: float) -> str:
    """Return the time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def tags_body(models: Iterable[ModelState]) -> JsonObject:
    """Return the list of models that there are."""
    return {
        "models": [
            _entry(model) | {"modified_at": iso_time(_modified_s(model))} for model in models
        ]
    }


def ps_body(models: Iterable[ModelState]) -> JsonObject:
    """Return the list of models that are loaded, with the time at which each is unloaded if nobody asks."""
    loaded = []
    for model in models:
        if model.opened is None or model.expires_in_s is None:
            continue
        until = _NEVER
        if model.expires_in_s != FOREVER:
            until = iso_time(time.time() + model.expires_in_s)
        allocation = model.opened.engine.statistics().allocation
        loaded.append(
            _entry(model)
            | {
                "expires_at": until,
                "size_vram": 0 if allocation is None else _device_bytes(allocation),
                "context_length": model.opened.engine.max_context_tokens,
            }
        )
    return {"models": loaded}


def show_body(model: ModelState, facts: ShownFacts) -> JsonObject:
    """Return the model's properties."""
    capabilities = ["completion"]
    capabilities += ["embedding"] if facts.spec.own_pooling else []
    capabilities += ["tools"] if facts.template.knows_tools else []
    capabilities += ["thinking"] if facts.template.thinks else []
    card = model.model.card
    return {
        "modelfile": f"FROM {card.id}",
        "parameters": "",
        "template": "",
        "details": _details(model, facts.spec.architecture),
        "model_info": _model_info(facts.spec, card.num_parameters),
        "capabilities": capabilities,
        "modified_at": iso_time(_modified_s(model)),
    }


def _device_bytes(found: DeviceAllocation) -> int:
    return found.non_expert_bytes + found.kv_bytes + found.staging_bytes + found.slot_bytes


def _modified_s(model: ModelState) -> float:
    return model.model.modified_s if model.opened is None else model.opened.opened_at


def _entry(model: ModelState) -> JsonObject:
    fingerprint, card = model.model.fingerprint, model.model.card
    architecture = card.architecture
    if model.opened is not None:
        fingerprint = model.opened.fingerprint
        architecture = model.opened.engine.spec.architecture
    return {
        "name": card.id,
        "model": card.id,
        "size": card.total_bytes,
        "digest": hashlib.sha256(fingerprint.encode()).hexdigest(),
        "details": _details(model, architecture),
    }


def _details(model: ModelState, family: str) -> JsonObject:
    card = model.model.card
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _short_count(card.num_parameters),
        "quantization_level": card.quant,
    }


def _short_count(count: int) -> str:
    """Return the count as in "30.5B"."""
    unit, name = next((unit, name) for unit, name in _UNITS if count >= unit or unit == 1)
    return f"{count / unit:.4g}{name}"


def _model_info(spec: ModelSpec, num_parameters: int) -> JsonObject:
    """Return the model's dimensions under the names that GGUF files have for them."""
    dimensions = {
        "block_count": spec.num_layers,
        "context_length": spec.context_length,
        "embedding_length": spec.hidden_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "expert_count": spec.router.num_experts,
        "expert_used_count": spec.router.num_experts_used,
    }
    return {
        "general.architecture": spec.architecture,
        "general.basename": spec.name,
        "general.parameter_count": num_parameters,
    } | {f"{spec.architecture}.{name}": value for name, value in dimensions.items()}
