"""Reads what /api/show tells of a model that is not in memory, from its file's header."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.models.registry import read_spec
from thermocline.server.ollama.about import ShownFacts
from thermocline.text.templates.template_facts import read_template
from thermocline.text.templates.template_file import read_template_file

if TYPE_CHECKING:
    from thermocline.server.core.catalogue import ModelSource


def read_facts(model: ModelSource) -> ShownFacts:
    """Return the facts of a model's file. Takes milliseconds: not for an event loop. Raises ModelError and ConfigError."""
    with open_guarded_model(model.path) as file:
        spec = read_spec(file)
        source = file.metadata.get_str("tokenizer.chat_template", default="")
    given = model.config.chat_template_file
    return ShownFacts(spec, read_template(source if given is None else read_template_file(given)))
