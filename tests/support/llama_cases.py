"""Which toy models llama.cpp computes as transformers does, and how it differs on the others."""

from __future__ import annotations

from tests.support.arch_cases import ARCH_CASES

LLAMA_CASES = tuple(
    case
    for case in ARCH_CASES
    if case.toy.arch != "phimoe"  # which llama.cpp computes otherwise; see test_llama_phimoe
    and case.name
    not in (
        *("olmoe_shared_heads", "olmoe_tied_all_experts", "qwen2moe_tied_unbiased"),
        *("laguna_own_yarn", "deepseek2_large_v2", "gemma4_small_uneven"),
        "bailingmoe_one_dense",
        *("deepseek32_odd", "glm-dsa_odd", "glm5-next_two_streams"),
        *("deepseek4_odd", "deepseek4_two_streams", "deepseek4_windows_alone"),
        *(f"qwen4exp_{name}" for name in ("default", "no_ngrams", "odd", "two_choices")),
        *("mellum_own_base", "granite_swa_dense_odd"),
        *("llama4_default", "llama4_odd", "smallthinker_near"),
        *("dots3note_default", "dots3note_odd", "dots3note_no_windows"),
        *("granitehybrid_lone_layer", "lfm2_all_attend", "kimi-linear_two_matrices"),
        *("jamba_narrow_state", "jamba_all_attend"),
    )
)
"""The models that llama.cpp opens and computes as transformers does.

There chunks are of 8192 tokens whatever the file says, olmoe and qwen2moe are neither tied nor have fewer key heads,
an indexer's rows are multiples of 64 numbers but for glm5-next, its streams and those of deepseek4 are four, some layer
of deepseek4 chooses entries, qwen4exp reads positions of one more block where the last is incomplete, bailingmoe has no
dense layers, a window of mellum's has no base of its own, a group is judged by its best two experts, YaRN's own factor is
not read, granite_swa has windows, the last layers with keys of their own are one with a window and one without, a hybrid
has a recurrent layer, jamba's Mamba is twice as wide as the model, kimi-linear's queries are one matrix and its keys apart
from its values, and all positions are chosen of dots3note, whose indexer turns otherwise there (docs/decisions/0122).
"""

WHOLE_TAIL_CASES = tuple(
    case for case in ARCH_CASES if case.name in ("qwen4exp_default", "qwen4exp_no_ngrams")
)
"""Those whose last layer alone attends, to whole blocks of four positions and what is behind them."""
