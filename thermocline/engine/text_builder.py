"""Opens what turns text into tokens and back, and the threads for it. A part of the assembly."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.errors import ModelFileError
from thermocline.models.metadata import RERANKING_HEAD
from thermocline.sampling.matcher import Grammars, open_trials
from thermocline.text.rerank_prompt import TEMPLATE_KEY, RerankPrompt
from thermocline.text.template_holder import TemplateHolder
from thermocline.text.templates.template_file import read_template_file
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData
from thermocline.workers.offload import Offload

if TYPE_CHECKING:
    from contextlib import ExitStack

    from thermocline.config import EngineConfig
    from thermocline.modelfile.reader import ModelFile


@dataclass(frozen=True, slots=True)
class TextParts:
    """What an engine knows of text."""

    tokenizer: Tokenizer
    template: TemplateHolder
    rerank_prompt: RerankPrompt | None
    grammars: Grammars
    offload: Offload


def open_text(
    config: EngineConfig, file: ModelFile, vocab_size: int, owned: ExitStack
) -> TextParts:
    """Return the file's text parts; `owned` closes them.

    vocab_size: rows of the embedding. Raises ModelFileError, and ConfigError for another chat template.
    """
    path = config.chat_template_file
    given = None if path is None else read_template_file(path)
    tokenizer = Tokenizer(TokenizerData.from_metadata(file.metadata, path=file.path))
    if tokenizer.vocab_size != vocab_size:
        raise ModelFileError(
            file.path,
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the embedding has {vocab_size} rows",
            fix="convert or download the model again",
        )
    source = file.metadata.get_str("tokenizer.chat_template", default="")
    template = owned.enter_context(closing(TemplateHolder(given or source, tokenizer)))
    if given is not None:
        template.check(f"--chat-template-file {path}")
    grammars = owned.enter_context(closing(Grammars(tokenizer, open_trials(tokenizer))))
    pairs = file.metadata.get_str(TEMPLATE_KEY, default="")
    rerank = RerankPrompt(pairs, tokenizer) if pairs and RERANKING_HEAD in file.tensors else None
    return TextParts(tokenizer, template, rerank, grammars, owned.enter_context(closing(Offload())))
