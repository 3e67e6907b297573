"""Prediction: the router's own choice from an earlier state, recency beside it, and an honest score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_decode
from tests.support.kernel_cases import decoded, float_weight
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import Centering, Gating, RoutingRule
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.routing import RouterWeights
from thermocline.prefetch.predictor import Predictor, likely_experts

L0 = LayerIndex(0)
KERNELS = ReferenceKernels()


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def unit_router(num_experts: int, num_used: int) -> RouterWeights:
    """A router whose expert n listens to number n of the state."""
    eye = float_weight(np.eye(num_experts, dtype=np.float32))
    return RouterWeights(
        np.ones(num_experts, np.float32), eye, 1e-6, RoutingRule(num_used, True, 1e-5, 1.0)
    )


def state(num_experts: int, *loud: int) -> np.ndarray:
    """One token's state that is loud at some numbers."""
    x = np.zeros((1, num_experts), np.float32)
    x[0, list(loud)] = 1.0
    return x


@pytest.mark.parametrize(
    "kernels", [ReferenceKernels(), NativeKernels(threads=1)], ids=["reference", "native"]
)
def test_with_the_layers_own_state_the_guess_is_the_models_choice(kernels, tmp_path):
    """From the very state that the router sees, the guess equals what it selects, for several tokens."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape())
    with open_model_file(path) as file:
        model = open_model(file, kernels)
        draw = np.random.default_rng(3)
        for layer in (LayerIndex(0), LayerIndex(1)):
            router = model.router_weights(layer)
            for num_tokens in (1, 5):
                x = draw.standard_normal((num_tokens, 64)).astype(np.float32)
                chunk = make_chunk(num_tokens=num_tokens)
                routing = model.route(layer, make_decode(chunk), x).routing
                expected = np.unique(routing.expert_ids)
                assert likely_experts(router, kernels, x).tolist() == expected.tolist()


@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("biased", "logit_biased"), [(False, True), (True, False), (True, True)])
def test_the_guess_follows_every_routing_rule(gating, groups, biased, logit_biased):
    """Biases and groups decide in the guess as they do in the kernels."""
    draw = np.random.default_rng(5)
    bias, logit_bias = (draw.standard_normal(12).astype(np.float32) for _ in range(2))
    rule = RoutingRule(
        *(3, True, 1e-5, 1.0, gating),
        bias=bias if biased else None,
        logit_bias=logit_bias if logit_biased else None,
        groups=groups,
        groups_used=min(groups, 2),
    )
    matrix = draw.standard_normal((12, 16)).astype(np.float32)
    router = RouterWeights(np.ones(16, np.float32), float_weight(matrix), 0.0, rule)
    x = draw.standard_normal((6, 16)).astype(np.float32)
    x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    ids, _ = ReferenceDense().route(x @ matrix.T, rule)
    for kernels in (ReferenceKernels(), NativeKernels(threads=1)):
        assert likely_experts(router, kernels, x).tolist() == np.unique(ids).tolist()


def test_a_router_of_the_layers_input_takes_it_without_a_norm(tmp_path):
    """SmallThinker's: the guess of a layer from its own input is the layer's choice."""
    path = write_toy_arch(tmp_path / "thinker.gguf", ToyArch("smallthinker"))
    with open_model_file(path) as file:
        router = open_model(file, ReferenceKernels()).router_weights(LayerIndex(1))
        weights = router.matrix
        x = np.random.default_rng(0).standard_normal((1, weights.cols)).astype(np.float32)
        x[0, 0] = 100.0
        best = np.argsort(decoded(weights) @ x[0])[-router.rule.chosen :]
        assert likely_experts(router, ReferenceKernels(), x).tolist() == sorted(best.tolist())
    assert router.gain is None


def test_a_router_behind_a_norm_that_takes_the_mean_off(tmp_path):
    """A constant in the stream changes no guess then; without the flag it does. A parallel layer's model says so."""
    draw = np.random.default_rng(6)
    matrix, x = draw.standard_normal((12, 16)), draw.standard_normal((6, 16)).astype(np.float32)
    rule = RoutingRule(3, True, 1e-5, 1.0, Gating.SIGMOID)
    plain = RouterWeights(
        np.ones(16, np.float32), float_weight(matrix.astype(np.float32)), 1e-6, rule
    )
    centered = replace(plain, centering=Centering())
    for kernels in (ReferenceKernels(), NativeKernels(threads=1)):
        near, far = (likely_experts(centered, kernels, x[:1] + shift) for shift in (0, 20))
        assert near.tolist() == far.tolist()
        assert likely_experts(plain, kernels, x[:1] + 20).tolist() != near.tolist()
    toy = ToyArch("cohere2moe", window=16, shared=64)
    with open_model_file(write_toy_arch(tmp_path / "m.gguf", toy)) as file:
        assert (
            open_model(file, ReferenceKernels()).router_weights(LayerIndex(1)).centering is not None
        )


def test_a_state_of_zeros_is_no_error():
    """The norm's epsilon keeps the guess finite."""
    assert len(likely_experts(unit_router(4, 2), KERNELS, np.zeros((1, 4), np.float32))) == 2


def test_the_score_counts_what_was_right():
    """Two of three predicted experts selected: recall 2/4, precision 2/3 of that guess."""
    predictor = Predictor(lambda _: unit_router(8, 3), KERNELS, 1, 8)
    assert predictor.from_state(L0, state(8, 1, 2, 3)).tolist() == [1, 2, 3]
    predictor.observe(L0, ids(2, 3, 4, 5))
    (score,) = predictor.scores()
    assert (score.total_selected, score.total_predicted, score.total_correct) == (4, 3, 2)
    assert (score.recall, score.precision) == (0.5, pytest.approx(2 / 3))


def test_recency_is_scored_beside_the_acted_guess():
    """The second time the same experts come, recency would have known them all."""
    predictor = Predictor(lambda _: unit_router(8, 2), KERNELS, 1, 8)
    for _ in range(2):
        predictor.from_state(L0, state(8, 0, 1))
        predictor.observe(L0, ids(6, 7))
    (score,) = predictor.scores()
    assert score.total_correct == 0
    assert score.recency_recall == 0.5


def test_experts_that_tokens_name_are_known():
    """Whatever the state says; several tokens' together."""
    table = np.array([[1, 2], [7, 0], [2, 5]], np.int32)
    router = replace(unit_router(8, 2), by_token=table)
    predictor = Predictor(lambda _: router, KERNELS, 1, 8)
    assert predictor.from_state(L0, state(8, 3, 4), ids(1)).tolist() == [0, 7]
    assert predictor.from_state(L0, state(8, 3, 4), ids(2, 0)).tolist() == [1, 2, 5]


def test_recent_use_decays():
    """An expert used often long ago yields to one used lately."""
    predictor = Predictor(lambda _: unit_router(8, 1), KERNELS, 1, 8)
    for expert in (1, 1, 1, *[2] * 8):
        predictor.observe(L0, ids(expert))
    assert predictor.from_recency(L0, 1).tolist() == [2]


def test_a_guess_by_recency_alone_is_scored():
    """Where no state was given, the recency guess is the one that counts."""
    predictor = Predictor(lambda _: unit_router(8, 1), KERNELS, 1, 8)
    for _ in range(3):
        predictor.from_recency(L0, 1)
        predictor.observe(L0, ids(5))
    (score,) = predictor.scores()
    assert (score.total_predicted, score.total_correct, score.total_selected) == (2, 2, 3)


def test_a_step_without_a_guess_is_not_scored():
    """It says nothing about guesses, good or bad."""
    predictor = Predictor(lambda _: unit_router(8, 1), KERNELS, 1, 8)
    predictor.from_state(L0, state(8, 5))
    for _ in range(3):
        predictor.observe(L0, ids(5))
    (score,) = predictor.scores()
    assert (score.total_predicted, score.total_correct, score.total_selected) == (1, 1, 1)


def test_guesses_that_are_mostly_wrong_are_not_acted_upon_but_go_on_being_scored():
    """Once the precision over enough guesses is below half the answer is empty, until it is better."""
    predictor = Predictor(lambda _: unit_router(8, 2), KERNELS, 1, 8)
    for _ in range(40):
        predictor.from_state(L0, state(8, 0, 1))
        predictor.observe(L0, ids(6, 7))
    assert len(predictor.from_state(L0, state(8, 0, 1))) == 0
    for _ in range(60):
        predictor.from_state(L0, state(8, 6, 7))
        predictor.observe(L0, ids(6, 7))
    assert predictor.from_state(L0, state(8, 6, 7)).tolist() == [6, 7]


def test_a_model_never_used_scores_zero():
    """No division by nothing."""
    (score,) = Predictor(lambda _: unit_router(4, 1), KERNELS, 1, 4).scores()
    assert score.recall == score.precision == score.recency_recall == 0.0
