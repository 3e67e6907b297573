"""The cost model, against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning import plan_of
from tests.support.speeds import DEVICE, DISK, LAYOUT, speeds
from thermocline.costmodel.cost_model import (
    Phase,
    Resource,
    Workload,
    copy_seconds,
    device_seconds,
    estimate,
    expected_rows,
    expert_seconds_cpu,
    non_expert_kind,
)
from thermocline.costmodel.disk_costs import HostMemory
from thermocline.costmodel.machine_speeds import RowCosts
from thermocline.errors import ConfigError
from thermocline.models.sizes import LayerSizes, ModelSizes

MB, GB = 10**6, 10**9
STEP = Workload(Phase.DECODE, 1)


def sizes(*layers: LayerSizes) -> ModelSizes:
    """A head of 20 MB; 8 experts, of which a token uses 2."""
    return ModelSizes(layers or (layer(),) * 2, 10 * MB, 20 * MB, 8, 2, hidden_size=64)


def layer(trunk=30 * MB, kv=0, expert=5 * MB, layout=LAYOUT, state=0) -> LayerSizes:
    return LayerSizes(trunk, kv, expert, layout, state)


def test_a_decoded_token_reads_trunk_experts_and_head():
    """(2 x (30 + 2 x 5) + 20) MB at 10 GB/s are 10 ms; memory is the bound."""
    found = estimate(sizes(), speeds(), None, STEP)
    assert found.seconds == pytest.approx(0.010)
    assert found.tokens_per_s == pytest.approx(100)
    assert found.parts[Resource.EXPERTS] == pytest.approx(0.002)
    assert found.bound == "the CPU's memory reads"
    assert str(found) == "100 tokens/s, bound by the CPU's memory reads"


def test_bookkeeping_counts_per_step_and_chunk():
    """Three milliseconds on top of 10; of a prompt, for each of its chunks."""
    found = estimate(sizes(), speeds(step_s=3e-3), None, STEP)
    assert found.seconds == pytest.approx(0.013)
    prompt = Workload(Phase.PREFILL, 40, chunk_tokens=16)
    found = estimate(sizes(), speeds(step_s=3e-3), None, prompt)
    assert found.parts[Resource.OVERHEAD] == pytest.approx(0.009)
    slow = estimate(sizes(), speeds(step_s=1.0), None, STEP)
    assert slow.bound == "bookkeeping"


def test_attention_is_priced_by_pairs_in_layers_with_a_cache():
    """99 cached tokens and the token itself in one of two layers: 100 pairs of 10 ns."""
    model = sizes(layer(kv=8), layer(state=4096))
    found = estimate(model, speeds(), None, Workload(Phase.DECODE, 1, cached_tokens=99))
    assert found.parts[Resource.ATTENTION] == pytest.approx(1e-6)


@pytest.mark.parametrize("chunk_tokens", [7, 512])
@pytest.mark.parametrize("cached", [0, 5, 30])
def test_attention_looks_no_further_than_a_window(chunk_tokens, cached):
    """Counted pair by pair: what each token of a prompt, and of a step, sees."""
    windowed = replace(layer(kv=4), window=10)
    work = Workload(Phase.PREFILL, 25, cached_tokens=cached, chunk_tokens=chunk_tokens)
    pairs = sum(min(cached + n + 1, 10) for n in range(25))
    found = estimate(sizes(windowed), speeds(), None, work)
    per_pair = speeds().attention
    assert found.parts[Resource.ATTENTION] == pytest.approx(pairs * per_pair.prompt_pair_s)
    step = estimate(sizes(windowed), speeds(), None, replace(STEP, cached_tokens=cached))
    seen = min(cached + 1, 10)
    assert step.parts[Resource.ATTENTION] == pytest.approx(seen * per_pair.decode_pair_s)


def test_a_prompt_in_chunks_sees_the_same_pairs_as_in_one():
    """40 tokens: 820 pairs, however they are cut; the head runs once."""
    model = sizes(layer(kv=8))
    parts = [
        estimate(model, speeds(), None, Workload(Phase.PREFILL, 40, chunk_tokens=chunk)).parts
        for chunk in (40, 16, 7)
    ]
    assert [each[Resource.ATTENTION] for each in parts] == pytest.approx([820e-9] * 3)
    assert [each[Resource.HEAD] for each in parts] == pytest.approx([0.002] * 3)


def test_a_prompt_multiplies_its_rows():
    """Beyond what was measured, trunk costs rise with the rows: 32 rows cost twice 16."""
    found = estimate(sizes(), speeds(), None, Workload(Phase.PREFILL, 32))
    assert found.parts[Resource.NON_EXPERT] == pytest.approx(2 * 30 * MB * 4e-10)
    assert found.bound == "the CPU's arithmetic"


@given(
    st.integers(1, 16), st.data(), st.integers(1, 5000), st.none() | st.lists(st.integers(0, 99), min_size=16, max_size=16)
)  # fmt: skip
def test_expected_rows_share_out_every_choice(num_experts, data, num_tokens, heat):
    """Chosen times rows adds up to what all tokens choose, unless one would be chosen twice by a token."""
    used = data.draw(st.integers(1, num_experts))
    heat = None if heat is None else heat[:num_experts]
    found = expected_rows(num_experts, used, num_tokens, heat)
    assert all(0 <= chosen <= 1 for chosen, _ in found)
    total = sum(chosen * rows for chosen, rows in found)
    assert total <= used * num_tokens * (1 + 1e-9)
    if heat is None:
        assert total == pytest.approx(used * num_tokens)


def test_heat_concentrates_choices():
    """An expert that nobody chose costs nothing; of a token's two, all fall on the two that are left."""
    assert expected_rows(4, 2, 10, [5, 5, 0, 0])[2:] == ((0.0, 0.0), (0.0, 0.0))
    assert expected_rows(4, 2, 10, [5, 5, 0, 0])[0] == (1.0, 10.0)


def test_a_prompt_from_disk_takes_the_longer_of_reading_and_computing():
    """8 GB of experts at 1 GB/s, and the head behind them; half of it in memory halves that; all ends it."""
    model = sizes(layer(expert=500 * MB), layer(expert=500 * MB))
    work = Workload(Phase.PREFILL, 32)
    dry = estimate(model, speeds(), None, work)
    trunk = 90 * MB

    def with_resident(nbytes):
        memory = HostMemory(100 * GB, nbytes)
        return estimate(model, speeds(disk=DISK), None, work, memory=memory)

    assert with_resident(trunk).seconds == pytest.approx(8.002, rel=0.03)
    assert with_resident(trunk).bound == "disk reads"
    assert with_resident(trunk + 4 * GB).seconds == pytest.approx(4.002, rel=0.05)
    assert with_resident(trunk + 8 * GB).seconds == dry.seconds < 4


ALL = [[9, 9, *[1] * 6]] * 2
"""With this heat 512 tokens choose all experts."""


def test_the_trunk_is_read_ahead_in_order():
    """80 MB of it and the head and 80 of experts at 1 GB/s; the head's product alone is left then."""
    work = Workload(Phase.PREFILL, 512)
    fast = speeds(
        experts={LAYOUT: RowCosts((1,), (1e-13,))}, trunk={"attention": RowCosts((1,), (1e-13,))}
    )
    cold = estimate(
        sizes(), replace(fast, disk=DISK), None, work, memory=HostMemory(GB, 0), heat=ALL
    )
    assert cold.seconds == pytest.approx(0.160 + 0.002, rel=0.01)


def test_every_chunk_after_the_first_reads_what_memory_does_not_hold():
    """80 MB of trunk and 80 of experts, then 70 of experts twice more where memory holds 100 of 170.

    What has to go first where memory is full goes beside that.
    """
    work = Workload(Phase.PREFILL, 3 * 512, chunk_tokens=512)
    memory = HostMemory(100 * MB, 0)
    found = estimate(sizes(), speeds(disk=DISK), None, work, memory=memory, heat=ALL)
    assert sizes().total == 170 * MB
    assert found.parts[Resource.DISK] == pytest.approx(0.08 + 0.08 + 2 * 0.07)
    slow = replace(DISK, release_bytes_per_s=1e6)
    found = estimate(sizes(), speeds(disk=slow), None, work, memory=memory, heat=ALL)
    # Of what is read 40 MB find room, and 180 do not.
    assert found.parts[Resource.DISK] == pytest.approx(180, rel=0.01)


def test_experts_that_nobody_chose_are_read_only_until_that_is_known():
    """Half of 8 GB are chosen; of the others half of what comes while the layer computes."""
    model = sizes(*[layer(expert=500 * MB)] * 2)
    heat = [[1, 1, 1, 1, 0, 0, 0, 0]] * 2

    def read_s(trunk_s):
        fast = RowCosts((1,), (1e-13,))
        slow = RowCosts((1,), (trunk_s / (30 * MB) / 512,))
        known = speeds(disk=DISK, experts={LAYOUT: fast}, trunk={"attention": slow})
        memory = HostMemory(100 * GB, 90 * MB)
        work = Workload(Phase.PREFILL, 512)
        return estimate(model, known, None, work, memory=memory, heat=heat).parts[Resource.DISK]

    assert read_s(1e-6) == pytest.approx(4.0, rel=0.01)
    assert read_s(0.5) == pytest.approx(4.5, rel=0.01)
    assert read_s(100.0) == pytest.approx(8.0)


def test_a_decoded_token_waits_for_the_experts_that_memory_does_not_hold():
    """Half of the experts fit: of 20 MB selected, 11.5 and what is read ahead in vain come at 500 MB/s, behind 10 ms of
    computing. Others go beside that.

    Where heat says that half of the experts are all that is used, nothing is missed.
    """
    memory = HostMemory(130 * MB, 130 * MB)
    found = estimate(sizes(), speeds(disk=DISK), None, STEP, memory=memory)
    assert found.parts[Resource.DISK] == pytest.approx(0.0265, rel=0.01)
    assert found.seconds == pytest.approx(0.0365, rel=0.01)
    heat = [[1, 1, 1, 1, 0, 0, 0, 0]] * 2
    found = estimate(sizes(), speeds(disk=DISK), None, STEP, memory=memory, heat=heat)
    assert found.parts[Resource.DISK] == pytest.approx(0.0, abs=1e-6)


def test_what_the_token_before_chose_is_still_there():
    """Half of the experts fit. Repeats as by chance, a quarter here, change nothing; more of them leave less to read."""
    memory = HostMemory(130 * MB, 130 * MB)

    def reads_s(share):
        repeats = None if share is None else [share] * 2
        found = estimate(sizes(), speeds(disk=DISK), None, STEP, memory=memory, repeats=repeats)
        return found.parts[Resource.DISK]

    assert reads_s(0.25) == reads_s(0.0) == reads_s(None)
    assert reads_s(0.25) > reads_s(0.4) > reads_s(0.7) > reads_s(1.0) == pytest.approx(0, abs=1e-6)


def test_memory_for_less_than_two_layers_leaves_nothing_to_read_ahead():
    """With room for one layer of 4 GB reading waits for the layer before it; with room for two it does not."""
    model = sizes(*[layer(trunk=GB, expert=500 * MB)] * 4)
    work = Workload(Phase.PREFILL, 64)

    def seconds(room):
        trunk = model.total - model.routed
        memory = HostMemory(trunk + room, trunk)
        return estimate(model, speeds(disk=DISK), None, work, memory=memory).seconds

    assert seconds(4 * GB) > seconds(5 * GB) > seconds(8 * GB)


def test_reading_takes_the_processor_from_computing():
    """Two threads share a nanosecond per byte of 8 GB of experts: 4 s more."""
    model = sizes(*[layer(expert=500 * MB)] * 2)
    memory = HostMemory(100 * GB, 90 * MB)

    def seconds(cpu_s_per_byte):
        fast = replace(DISK, sequential_bytes_per_s=1e15, cpu_s_per_byte=cpu_s_per_byte)
        work = Workload(Phase.PREFILL, 512)
        return estimate(model, speeds(disk=fast), None, work, memory=memory, heat=ALL).seconds

    assert seconds(1e-9) == pytest.approx(seconds(0.0) + 4.0)


def test_a_step_waits_for_the_processor_where_reading_keeps_it_longer_than_the_disk():
    """13.2 MB are read and as many released: a microsecond of two threads for each byte of either."""
    memory = HostMemory(130 * MB, 130 * MB)
    busy = replace(DISK, cpu_s_per_byte=1e-6, release_cpu_s_per_byte=1e-6)
    found = estimate(sizes(), speeds(disk=busy), None, STEP, memory=memory)
    assert found.parts[Resource.DISK] == pytest.approx(13.2, rel=0.01)


def test_experts_on_the_device_are_not_read_from_disk():
    """All of them hot: what is left of the file needs no experts to be waited for."""
    plan = plan_of(sizes(), 9 * GB, num_tokens=16)
    known = speeds(device=DEVICE, disk=DISK)
    for phase in Phase:
        found = estimate(sizes(), known, plan, Workload(phase, 1), memory=HostMemory(0, 0))
        assert found.parts[Resource.DISK] == 0.0


def test_hot_experts_compute_beside_cold_ones():
    """A device with room for all experts leaves the CPU nothing of them; a quarter of them leaves most."""
    model = sizes(layer(expert=500 * MB), layer(expert=500 * MB))
    known = speeds(device=DEVICE)

    def with_room(nbytes):
        plan = plan_of(model, nbytes, num_tokens=16)
        return estimate(model, known, plan, STEP)

    everything, some, nothing = with_room(40 * GB), with_room(12 * GB), with_room(0)
    assert everything.parts[Resource.EXPERTS] == everything.parts[Resource.NON_EXPERT] == 0.0
    assert everything.bound == "device"
    assert 0 < some.parts[Resource.EXPERTS] < nothing.parts[Resource.EXPERTS]
    assert some.parts[Resource.COPY] > 0
    assert everything.seconds < some.seconds < nothing.seconds


def test_prices_of_single_experts():
    """What the expert cache weighs: the CPU's, the copy's and the device's seconds for one expert."""
    assert expert_seconds_cpu(speeds(), LAYOUT, 10 * MB, 16) == pytest.approx(0.002)
    assert copy_seconds(DEVICE, 20 * MB) == pytest.approx(0.001)
    assert device_seconds(DEVICE, 10 * MB, 1) == pytest.approx(1e-5)
    assert device_seconds(DEVICE, 9 * MB, 1000) == pytest.approx(16e9 / 1e14)


def test_what_was_not_measured_is_named():
    """A layout, a disk or a device that nobody measured is an error which says what to do."""
    with pytest.raises(ConfigError, match="doctor MODEL --again"):
        expert_seconds_cpu(speeds(), "another", MB, 1)
    with pytest.raises(ConfigError, match="disk"):
        estimate(sizes(), speeds(), None, STEP, memory=HostMemory(0, 0))
    plan = plan_of(sizes(), GB, num_tokens=16)
    with pytest.raises(ConfigError, match="device"):
        estimate(sizes(), speeds(), plan, STEP)


def test_layers_of_a_kind_share_their_costs():
    """What differs in kind is named apart."""
    names = [non_expert_kind(each) for each in (layer(), layer(state=1), layer(expert=0))]
    assert names == ["attention", "recurrent", "attention, dense"]
