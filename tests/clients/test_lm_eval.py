"""lm-eval: scores of texts by `local-completions`, with a task of its own and the server's tokenizer."""

from __future__ import annotations

import json
import math

import pytest

lm_eval = pytest.importorskip("lm_eval")
instances = pytest.importorskip("lm_eval.api.instance")
tasks_of = pytest.importorskip("lm_eval.tasks")
apis = pytest.importorskip("lm_eval.models.openai_completions")

pytestmark = pytest.mark.clients

TASK = """
task: thermocline_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: " "
metric_list:
  - metric: acc
"""
# The first choice is what the model was trained on; the second is made of the same words.
ASKED = (
    ("The router", ["chooses the experts of each token.", "token each of experts the chooses."]),
    ("Thermocline runs", ["mixture-of-experts models.", "models experts-of-mixture."]),
    ("A cold expert", ["is read from disk.", "disk from read is."]),
)


@pytest.fixture(scope="module")
def scorer(url, model):
    """lm-eval's model of the server."""
    return apis.LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=model, tokenizer_backend="remote", max_length=512
    )


def test_a_task_is_scored(scorer, tmp_path):
    """Every choice is scored, and text that the model knows is likelier than the same words in disorder."""
    data = tmp_path / "asked.json"
    data.write_text("\n".join(json.dumps({"question": q, "choices": c}) for q, c in ASKED))
    (tmp_path / "task.yaml").write_text(TASK.format(path=data))
    tasks = tasks_of.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=scorer, tasks=["thermocline_choice"], task_manager=tasks, bootstrap_iters=0
    )
    assert found["results"]["thermocline_choice"]["acc,none"] == 1.0


def test_scores_are_those_of_parts(scorer):
    """The score of a text is the sum over its parts, and greedy text says that it is."""
    request = instances.Instance

    def score(context, text):
        ask = request("loglikelihood", {}, (context, text), 0)
        return scorer.loglikelihood([ask])[0]

    whole, _ = score("The router", " chooses experts")
    first, _ = score("The router", " chooses")
    second, _ = score("The router chooses", " experts")
    assert math.isclose(whole, first + second, abs_tol=1e-3)
