"""Which tokens end an answer, for the control tokens of each published family, against llama.cpp."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.text.vocabularies import train
from thermocline.text.tokenization.token_kinds import TokenType
from thermocline.text.tokenizer import Tokenizer

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from tests.oracle.llama_vocabulary import LlamaVocabulary, write_vocabulary
from tests.oracle.token_strings import assert_same_tokens

pytestmark = pytest.mark.oracle

# Pre-tokenizer; control tokens; those that the converter names as EOS, EOT and EOM; those that end answers.
FAMILIES = {
    "gpt-oss": (
        "gpt-4o",
        "<|start|> <|channel|> <|message|> <|constrain|> <|end|> <|call|> <|return|>",
        ("<|return|>", None, None),
        "<|call|> <|return|>",
    ),
    "glm4moe": (
        "glm4",
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call>",
        (None, "<|user|>", "<|observation|>"),
        "<|user|> <|observation|>",
    ),
    "deepseek2": (
        "deepseek-v3",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁end｜> <｜fim▁hole｜>",
        ("<｜end▁of▁sentence｜>", None, None),
        "<｜end▁of▁sentence｜>",
    ),
    "kimi-k2": (
        "kimi-k2",
        "[BOS] [EOS] <|im_user|> <|im_assistant|> <|im_middle|> [EOT] <|tool_calls_section_end|> [PAD]",
        ("[EOS]", None, None),
        "[EOS] [EOT] [PAD]",
    ),
    "minimax-m2": ("minimax-m2", "]~!b[ ]~b] [e~[ <minimax:tool_call>", ("[e~[", None, None), "[e~["),
    "nemotron_h_moe": ("pixtral", "<s> </s> <|im_start|> <think> </think>", (None, None, None), "</s>"),
    "llama": (
        "llama-bpe",
        "<|begin_of_text|> <|end_of_text|> <|eot_id|> <|eom_id|> <|python_tag|> <|start_header_id|>",
        ("<|eot_id|>", None, None),
        "<|end_of_text|> <|eot_id|> <|eom_id|>",
    ),
    "lfm2moe": ("lfm2", "<|startoftext|> <|im_start|> <|tool_call_start|> <|tool_call_end|>", (None, None, None), ""),
    "granitemoe": (
        "refact",
        "<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>",
        ("<|end_of_text|>", None, None),
        "<|end_of_text|>",
    ),
    "granitehybrid": (
        "dbrx",
        "<|end_of_text|> <|fim_prefix|> <|fim_pad|> <|start_of_role|> <|end_of_role|>",
        ("<|end_of_text|>", None, None),
        "<|end_of_text|> <|fim_pad|>",
    ),
    "hunyuan-moe": ("hunyuan", "<|startoftext|> <|extra_0|> <|extra_4|> <|eos|>", ("<|eos|>", None, None), "<|eos|>"),
    "bailingmoe2": ("bailingmoe2", "<|startoftext|> <|role_end|> [gMASK]", ("<|role_end|>", None, None), "<|role_end|>"),
    "dots1": (
        "qwen2",
        "<|system|> <|endofsystem|> <|userprompt|> <|endofuserprompt|> <|response|> <|endofresponse|>",
        ("<|endofresponse|>", None, None),
        "<|endofresponse|>",
    ),
    "gemma4": (
        "gemma4",
        "<eos> <turn|> <|turn> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <channel|> </s>",
        ("<turn|>", None, None),
        "<eos> <turn|> <|tool_response>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_ends_are_llama_cpps(tmp_path, family):
    """Exactly the family's ends end an answer, and kind and bytes of each token agree."""
    pre, names, (eos, eot, eom), ends = FAMILIES[family]
    base = train(pre, vocab_size=400, num_words=400)
    added = [name for name in names.split() if name not in base.tokens]
    tokens = (*base.tokens, *added)
    types = (*base.token_types, *[int(TokenType.CONTROL)] * len(added))
    ids = {
        kind: tokens.index(text)
        for kind, text in (("eos_id", eos), ("eot_id", eot), ("eom_id", eom))
        if text
    }
    vocabulary = replace(base, tokens=tokens, token_types=types)
    data = vocabulary.data(pre, **ids, **({"add_bos": True} if pre == "gemma4" else {}))
    write_vocabulary(tmp_path / "v.gguf", data)
    ours, llama = Tokenizer(data), LlamaVocabulary(tmp_path / "v.gguf")
    assert_same_tokens(ours, llama)
    llama.close()
    found = {ours.token_text(index) for index in ours.end_ids}
    assert found.intersection(names.split()) == set(ends.split())
