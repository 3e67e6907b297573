"""`thermocline plan`: what would lie where, for this machine or any other."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest

from benchmarks.synthetic_model import write_metadata
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_assistant import PAIRS, assistant_weights, write_assistant
from tests.support.toy_dflash import TARGET, TOYS, toy_drafter_weights, write_toy_drafter
from tests.support.toy_eagle3 import EAGLES, eagle_weights, write_eagle
from tests.support.toy_model import ToyShape, toy_weights, write_toy_model
from thermocline.traces.chrome import write_chrome
from thermocline.traces.events import ExpertUse


@pytest.fixture
def toy(gpu_toy) -> str:
    """A toy model whose experts a GPU reads."""
    return gpu_toy


def planned(invoke, toy, *flags: str) -> dict:
    return json.loads(invoke("plan", toy, "--json", *flags).stdout)


def test_a_large_device_takes_all_but_the_embedding_table(toy, invoke):
    """Sizes are the file's own bytes; a cache of half as many bits takes half of the bytes."""
    weights = toy_weights(ToyShape())
    found = planned(invoke, toy, "--vram", "12GiB", "--ctx", "512", "--kv-type", "f32")
    experts = sum(w.size * 34 // 32 for name, w in weights.items() if "_exps" in name)
    assert found["routed_expert_bytes"] == found["hot_expert_bytes"] == experts
    assert found["trunk_layers_on_gpu"] == found["trunk_layers"] == 2
    embedding = weights["token_embd.weight"].nbytes
    tied = "output.weight" not in weights
    rotary = 512 * 4 * 32  # the cosines and sines of 32 dimensions
    assert found["trunk_bytes"] == rotary - (0 if tied else embedding) + sum(
        w.nbytes for name, w in weights.items() if "_exps" not in name
    )
    assert found["kv_contexts"] == 128, "one for each request, for they cost little"
    halves = planned(invoke, toy, "--vram", "12GiB", "--ctx", "512", "--kv-type", "bf16")
    assert found["kv_bytes"] == 2 * halves["kv_bytes"] > 0
    assert found["device_bytes"] <= found["device_bytes_limit"] == 12 << 30


@pytest.mark.slow
def test_a_published_model_is_planned_from_its_header(tmp_path, invoke):
    """All of Qwen3-30B-A3B's trunk on 12 GB, with every figure a program may want; the cache as asked for."""
    path = os.fspath(write_metadata(tmp_path / "model.gguf", "qwen3-30b-a3b"))
    found = planned(invoke, path, "--vram", "12GB", "--kv-dtype", "q8_0", "--ctx", "32768")
    assert {
        *("trunk_layers_on_gpu", "trunk_layers", "trunk_bytes", "kv_bytes", "staging_bytes"),
        *("expert_budget_bytes", "routed_expert_bytes", "device_bytes_total"),
        *("device_bytes_limit", "reasons"),
    } <= set(found)
    assert found["trunk_layers_on_gpu"] == found["trunk_layers"] == 48
    # One block of 16 tokens more, for rows that fill up a step.
    assert found["kv_bytes"] == 48 * 2 * 4 * 128 * (32768 + 16) * 34 // 32
    assert found["device_bytes_total"] == found["device_bytes_limit"] == 12 * 10**9
    assert found["hot_expert_bytes"] <= found["expert_budget_bytes"] < found["routed_expert_bytes"]
    flags = ("--prefill-chunk", "512")
    page = " ".join(invoke("plan", path, "--vram", "12GB", *flags).stdout.split())
    assert "48 of 48 layers" in page
    assert "1 full context" in page
    assert "experts have 6.38 GiB, of 16.35 GiB that could be there" in page


def test_windows_keep_what_chunks_in_flight_need(tmp_path, invoke):
    """Each chunk more is so many tokens more in four layers with a window; a worker makes two of the one chunk."""
    toy = ToyArch("mellum", layers=5, window=16, seed=90)
    path = os.fspath(write_toy_arch(tmp_path / "windows.gguf", toy))
    flags = ("--no-measure", "--ctx", "512", "--prefill-chunk", "32")

    def kept(*more: str) -> int:
        return planned(invoke, path, *flags, *more)["host_kv_bytes"]

    chunk_bytes = 32 * 4 * 2 * toy.kv_heads * toy.head_dim * 2
    one = kept("--prompt-chunks", "1")
    assert kept() == one
    assert kept("--prompt-chunks", "3") == one + 2 * chunk_bytes
    assert kept("--expert-worker", "local") == one + chunk_bytes


def test_nothing_is_chosen_by_itself_if_so_asked(toy, invoke):
    """--no-auto: what flags name goes to the device, and nothing else."""
    assert not any(planned(invoke, toy, "--vram", "12GiB", "--no-auto")["hot_experts"])
    flags = ("--no-auto", "--hot", "1:2-3", "--gpu-layers", "3")
    found = planned(invoke, toy, "--vram", "12GiB", *flags)
    assert found["hot_experts"] == [[], [2, 3]]
    assert found["trunk_layers_on_gpu"] == 2


def test_what_the_engine_can_not_do_is_refused(toy, invoke):
    """Flags that exclude each other, half a layer, or a context that does not fit: what works is named."""
    for flags, says in (
        (("--trunk-device", "cuda", "--hot-device", "torch-cpu"), "two devices"),
        (("--gpu-layers", "2", "--trunk-device", "cpu"), "exclude each other"),
        (("--gpu-layers", "0", "--trunk-device", "cuda"), "exclude each other"),
        (("--gpu-layers", "-1"), "--gpu-layers is -1"),
        (("-ot", "exps=CUDA0", "--hot-device", "none"), "leave one out"),
        (("-ot", "attn=CPU"), "what can be placed"),
        (("--trunk-device", "cuda", "--vram", "1MiB"), "--device-memory"),
        (("--trunk-device", "cuda", "--device-memory", "775MiB", "--ctx", "32768"), "--ctx"),
    ):
        result = invoke("plan", toy, "--no-measure", "--vram", "12GiB", *flags)
        assert result.exit_code == 1, flags
        assert says in " ".join(result.stderr.split()), flags


def test_a_cap_is_as_good_as_a_smaller_device(toy, invoke):
    """--device-memory of a large device is --vram of a small one; the stand-in has no more than that."""
    small = planned(invoke, toy, "--vram", "800MiB")
    for flags in (
        ("--vram", "12GiB", "--device-memory", "800MiB"),
        ("--trunk-device", "torch-cpu", "--hot-device", "torch-cpu", "--device-memory", "800MiB"),
    ):
        found = planned(invoke, toy, *flags)
        for name in ("non_expert_bytes", "kv_bytes", "expert_budget_bytes", "hot_experts"):
            assert found[name] == small[name], name


def test_experts_that_a_gpu_does_not_read_stay_on_the_cpu(tmp_path, invoke, monkeypatch):
    """None is promised, and the reason names the formats that work."""
    monkeypatch.setattr("thermocline.models.device.sizes.DEVICE_FORMATS", frozenset(["Q8_0"]))
    path = os.fspath(write_toy_model(tmp_path / "plain.gguf", ToyShape()))
    found = planned(invoke, path, "--vram", "12GiB")
    assert not any(found["hot_experts"])
    assert found["trunk_layers_on_gpu"] == 2
    assert any("formats that a GPU computes with" in reason for reason in found["reasons"])


def test_the_page_says_where_and_why(toy, invoke):
    """People get a table, the reasons, and what the host has to hold."""
    page = invoke("plan", toy, "--vram", "12GiB", "--ram", "1KiB").stdout
    for part in (
        "routed experts",
        "16 of 16 experts",
        "the whole trunk",
        "read from disk each time",
    ):
        assert part in " ".join(page.split()), part


def test_workers_hold_what_the_device_does_not(toy, invoke):
    """All of it, or a share; what becomes of failures is said."""
    flags = ("plan", toy, "--vram", "0", "--no-measure", "--expert-worker", "local")
    found = json.loads(invoke(*flags, "--expert-worker", "local:2", "--json").stdout)["workers"]
    half = json.loads(invoke(*flags, "--worker-share", "0.5", "--json").stdout)["workers"]
    assert found["num_experts"] == 2 * half["num_experts"] > 0
    assert found["nbytes"] == 2 * half["nbytes"] > 0
    assert (found["workers"], found["on_failure"]) == (["local", "local:2"], "cpu")
    words = " ".join(invoke(*flags, "--on-worker-failure", "error").stdout.split())
    assert "1 worker holds" in words
    assert "what is not answered is an error" in words
    assert json.loads(invoke("plan", toy, "--no-measure", "--json").stdout)["workers"] is None
    refused = invoke(*flags[:-1], "far:away")
    assert (refused.exit_code, "far:away" in refused.stderr) == (1, True)


def test_flags_keep_experts_off_the_device(toy, invoke):
    """All, those of the first layers, or single ones."""
    assert not any(planned(invoke, toy, "--vram", "12GiB", "--cpu-moe")["hot_experts"])
    found = planned(invoke, toy, "--vram", "12GiB", "--n-cpu-moe", "1", "--cold", "1:0")
    assert found["hot_experts"] == [[], [1, 2, 3, 4, 5, 6, 7]]
    found = planned(invoke, toy, "--vram", "12GiB", "-ot", r"blk\.0\.ffn_.*_exps=CPU")
    assert found["hot_experts"] == [[], [0, 1, 2, 3, 4, 5, 6, 7]]
    for flags in (("-cmoe",), ("-ncmoe", "2"), ("-ot", "exps=CPU")):
        assert not any(planned(invoke, toy, "--vram", "12GiB", *flags)["hot_experts"])


def test_flags_say_which_layers_are_on_the_device(toy, invoke):
    """By number from the end, the head first, or by the names of tensors; the host has the rest."""
    whole = planned(invoke, toy, "--vram", "12GiB")
    for flags, layers, head in (
        (("-ngl", "0"), [], False),
        (("--gpu-layers", "1"), [], True),
        (("-ngl", "2"), [1], True),
        (("--n-gpu-layers", "99"), [0, 1], True),
        (("-ngl", "all"), [0, 1], True),
        (("-ngl", "auto"), [0, 1], True),
        (("-ot", r"blk\.1\.(?!ffn_.*_exps)=CPU"), [0], True),
        (("-ngl", "0", "-ot", r"blk\.0\.(?!ffn_.*_exps)=CUDA0"), [0], False),
        (("-ot", "^output=CPU"), [0, 1], False),
        (("-ot", ".*=CPU"), [], False),
    ):
        found = planned(invoke, toy, "--vram", "12GiB", *flags)
        assert (found["device_layers"], found["head_on_device"]) == (layers, head), flags
        assert found["trunk_layers_on_gpu"] == len(layers)
        assert found["kv_bytes"] * 2 == whole["kv_bytes"] * len(layers)
        assert (found["host_kv_bytes"] > 0) == (len(layers) < 2)
    page = " ".join(
        invoke("plan", toy, "--no-measure", "--vram", "12GiB", "-ngl", "2").stdout.split()
    )
    assert "1 of 2 layers and the head" in page


def test_a_recorded_timeline_says_what_is_hot(toy, invoke, tmp_path):
    """With room for three experts, and as many uploads, the most used ones are chosen."""
    counts = ((9, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 7, 8))
    write_chrome(tmp_path / "t.json", [], metadata={}, expert_use=ExpertUse(counts, ((), ())))
    slot = 3 * 64 * 34 + 128  # a multiple of 256
    found = planned(
        invoke,
        toy,
        *(
            "--vram",
            "12GiB",
            "--expert-budget",
            f"{6 * slot}B",
            "--heat",
            str(tmp_path / "t.json"),
        ),
    )
    assert found["hot_experts"] == [[0], [6, 7]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--hot", "one"), "write layer:expert"),
        (("--hot", "9:0"), "layers 0 to 1"),
        (("--cold", "1-2"), "layers 0 to 1"),
        (("--ctx", "99999999"), "trained for"),
    ],
)
def test_what_can_not_be_is_said(toy, invoke, flags, says):
    """A wrong flag is one line that says the fix."""
    result = invoke("plan", toy, *flags)
    assert result.exit_code == 1
    assert says in result.stderr


@pytest.mark.parametrize("flag", ["--vram", "--ram", "--device-memory", "--expert-budget"])
def test_what_is_no_size_is_a_usage_error(invoke, flag):
    """Before the file is looked at."""
    result = invoke("plan", "nothing.gguf", flag, "much")
    assert result.exit_code == 2
    assert "is not a size" in result.stderr


def test_a_timeline_of_another_model_is_refused(toy, invoke, tmp_path):
    """Its layers and experts are not this model's."""
    write_chrome(tmp_path / "t.json", [], metadata={}, expert_use=ExpertUse(((1, 2),), ((),)))
    result = invoke("plan", toy, "--heat", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert "another model" in result.stderr


@pytest.mark.parametrize("available", [True, False])
def test_the_device_of_this_machine_is_asked_by_default(toy, invoke, monkeypatch, available):
    """Free memory is what the driver says, where there is a driver."""
    cuda = SimpleNamespace(is_available=lambda: available, mem_get_info=lambda: (3 << 30, 4 << 30))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("thermocline.kernels.gpu.memory.why_no_gpu", lambda: None)
    found = planned(invoke, toy)
    assert found["device_bytes_total"] == (4 << 30 if available else 0)
    assert found["device_bytes_limit"] == (3 << 30 if available else 0)


def test_what_drafts_is_counted(tmp_path, invoke):
    """A file that drafts, its keys and values for a context, and copies of recurrent states; none with speculation off."""
    path = str(write_toy_arch(tmp_path / "m.gguf", TARGET))
    toy = TOYS["plain"]
    drafter = str(write_toy_drafter(tmp_path / "drafter.gguf", toy))
    small = str(write_toy_arch(tmp_path / "small.gguf", ToyArch("qwen3", layers=2, experts=0)))
    flags = ("--vram", "12GiB", "--ctx", "512", "--kv-type", "f32")
    found = planned(invoke, path, *flags, "--draft-model", drafter)
    weights = sum(values.nbytes for values in toy_drafter_weights(toy).values())
    token_bytes = 2 * 4 * toy.layers * toy.kv_heads * toy.head_dim
    assert found["draft_model"] == {"weight_bytes": weights, "cache_bytes": 512 * token_bytes}
    here = ("--trunk-device", "cpu")
    on_host = planned(invoke, path, *flags, *here, "--draft-model", drafter)["draft_states_bytes"]
    assert on_host > 0
    assert found["draft_states_bytes"] == 0
    own = planned(invoke, path, *flags, "--draft-model", small)["draft_model"]
    assert own["cache_bytes"] == 512 * 2 * 4 * 2 * 2 * 16
    page = " ".join(invoke("plan", path, *flags, *here, "--draft-model", drafter).stdout.split())
    assert "the draft model takes" in page
    assert "keep up to 32 copies of recurrent state" in page
    off = planned(invoke, path, *flags, "--draft-model", drafter, "--speculate", "off")
    assert (off["draft_model"], off["draft_states_bytes"]) == (None, 0)
    assert found["kv_bytes"] - off["kv_bytes"] == on_host, "where states are, copies of them are"
    refused = invoke("plan", path, *flags, "--draft-model", path)
    assert refused.exit_code != 0
    assert "a draft model is dense" in " ".join(refused.stderr.split())


def test_a_drafter_without_a_cache_counts_its_weights(tmp_path, invoke):
    """Gemma 4's own reads what the model keeps; one for another model is refused."""
    pair = PAIRS["experts"]
    path = os.fspath(write_toy_arch(tmp_path / "m.gguf", pair.target))
    drafter = os.fspath(write_assistant(tmp_path / "drafter.gguf", pair))
    flags = ("--vram", "0B", "--ctx", "512", "--draft-model", drafter)
    weights = sum(values.nbytes for values in assistant_weights(pair).values())
    assert planned(invoke, path, *flags)["draft_model"] == {
        "weight_bytes": weights,
        "cache_bytes": 0,
    }
    page = " ".join(invoke("plan", path, *flags).stdout.split())
    assert "of the host, and nothing more for a full context" in page
    other = os.fspath(write_toy_arch(tmp_path / "other.gguf", PAIRS["odd"].target))
    refused = invoke("plan", other, *flags)
    assert refused.exit_code != 0
    assert "made for another model" in " ".join(refused.stderr.split())


def test_a_drafter_of_states_counts_them(tmp_path, invoke):
    """EAGLE-3 keeps a state at the end of each block, besides keys and values; one for another model is refused."""
    toy = EAGLES["wide"]
    path = os.fspath(write_toy_arch(tmp_path / "m.gguf", toy.target))
    drafter = os.fspath(write_eagle(tmp_path / "drafter.gguf", toy))
    flags = ("--vram", "0B", "--ctx", "512", "--kv-type", "f32", "--draft-model", drafter)
    weights = sum(values.nbytes for values in eagle_weights(toy).values())
    token_bytes = 2 * 4 * toy.kv_heads * toy.head_dim
    block_bytes = 16 * token_bytes + 4 * toy.hidden
    assert planned(invoke, path, *flags)["draft_model"] == {
        "weight_bytes": weights,
        "cache_bytes": 512 // 16 * block_bytes,
    }
    other = os.fspath(write_toy_arch(tmp_path / "other.gguf", EAGLES["rows"].target))
    refused = invoke("plan", other, *flags)
    assert refused.exit_code != 0
    assert "made for another model" in " ".join(refused.stderr.split())


def test_ranks_are_planned_term_by_term(toy, invoke):
    """The workspace is the formula's, and its terms are printed; what is no mesh is refused."""
    found = planned(invoke, toy, "--ep", "2x2", "--prefill-chunk", "64", "--max-requests", "16")
    ranks, traffic = found["ranks"], found["ranks"]["traffic"]
    assert (traffic["dispatchers"], traffic["tokens_each"], traffic["num_ranks"]) == (2, 64 + 16, 4)
    assert ranks["token_capacity"] == 2 * 80, "each replica's largest chunk, once"
    owned = min(traffic["num_experts_used"], traffic["num_owned"])
    assert ranks["pair_capacity"] == 160 * owned
    answer = ranks["pair_capacity"] * traffic["hidden"] * 4
    assert ranks["buffers"]["answer"] == answer
    assert ranks["workspace_bytes"] == 2 * sum(ranks["buffers"].values())
    divided = traffic["divided"]
    assert (divided["senders"], divided["width"], divided["chunk_tokens"]) == (4, 2, 80)
    assert ranks["buffers"]["mix"] == ranks["buffers"]["mixed"] == 40 * divided["row_bytes"] > 0
    naive = planned(
        *(invoke, toy, "--ep", "2x2", "--prefill-chunk", "64", "--max-requests", "16"),
        *("--expert-exchange", "naive", "--expert-payload", "bf16"),
    )["ranks"]
    assert naive["token_capacity"] == 2 * ranks["token_capacity"]
    assert naive["traffic"]["divided"] is None
    assert "mix" not in naive["buffers"]
    assert naive["buffers"]["answer"] == answer, "twice the outputs, of half the bytes"
    text = invoke("plan", toy, "--ep", "2", "--no-measure").stdout
    assert "workspace of a rank" in text
    assert "tokens that can arrive at a rank: 2 that dispatch" in " ".join(text.split())
    assert "experts: neighbouring experts on each rank" in " ".join(text.split())
    refused = invoke("plan", toy, "--ep", "2by2")
    assert refused.exit_code == 1
    assert "write DP or DPxTP" in refused.stderr


def test_memory_for_evicted_prompts_counts(toy, invoke):
    """It is the host's, beside the keys and values; a disk's is not memory."""
    plain = planned(invoke, toy, "--vram", "0B")
    spilt = planned(invoke, toy, "--vram", "0B", "--cache-spill", "3MiB")
    for name in ("host_bytes", "host_kv_bytes"):
        assert spilt[name] - plain[name] == 3 << 20
    assert any("--cache-spill" in reason for reason in spilt["reasons"])
