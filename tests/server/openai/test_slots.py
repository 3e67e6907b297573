"""Prompt caches saved to files and restored by another server, as llama-server's clients do it."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from tests.server.live import Live, live
from tests.server.several import folder_of, several
from tests.support.arch_cases import ARCH_CASES
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import EngineConfig, MemoryConfig, PlacementConfig, SchedulerConfig
from thermocline.kv.kept_prefix import PrefixParts, SequenceTokens

PROMPT = "Every lane waits for its turn, and nobody waits for a lane that is not theirs. " * 4
ASKED = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
CPU = PlacementConfig(hot_device="none", trunk_device="cpu")


async def complete(server: Live, **fields) -> tuple[list[int], int, int]:
    """Return the answer's token ids, and how many prompt tokens were found and computed."""
    status, body = await server.post(
        "/v1/completions", **ASKED | {"return_token_ids": True} | fields
    )
    assert status == 200, body
    timings = body["timings"]
    return body["choices"][0]["token_ids"], timings["cache_n"], timings["prompt_n"]


async def act(server, action: str, slot: int = 0, **fields) -> tuple[int, dict]:
    """Return status and body of an action on a slot."""
    return await server.post(f"/slots/{slot}?action={action}", **fields)


KINDS = (
    *("qwen3next", "lfm2moe", "nemotron_h_moe", "gpt-oss", "gemma4", "deepseek2", "kimi-linear"),
    *("glm-dsa", "glm5-next", "qwen4exp", "deepseek4", "dots3note", "hy_v4", "minimax-m3", "jamba"),
)
CASES = [next(case for case in ARCH_CASES if case.toy.arch == kind) for kind in KINDS]


@pytest.mark.parametrize("case", [None, *CASES], ids=str)
async def test_a_restored_slot_is_as_good_as_a_warm_one(tmp_path, case):
    """After a restart: equal tokens, and no more of the prompt is computed than where the server never ended."""
    path = tmp_path / "model.gguf"
    if case is None:
        write_toy_model(path, ToyShape(context=1 << 12))
    else:
        write_toy_arch(path, case.toy)
    config = EngineConfig(placement=CPU)
    async with live(path, config, slot_folder=str(tmp_path)) as server:
        cold, found, computed = await complete(server, id_slot=3)
        assert found == 0
        assert computed > 200
        status, saved = await act(server, "save", 3, filename="a.slot")
        assert status == 200, saved
        assert saved["id_slot"] == 3
        assert saved["n_written"] == (tmp_path / "a.slot").stat().st_size
        warm, warm_found, warm_computed = await complete(server, id_slot=3)
        assert warm == cold
        assert warm_found > 0
        assert saved["n_saved"] >= warm_found
    async with live(path, config, slot_folder=str(tmp_path)) as server:
        status, restored = await act(server, "restore", 5, filename="a.slot")
        assert status == 200, restored
        assert restored["n_restored"] == saved["n_saved"]
        assert restored["n_read"] == saved["n_written"]
        await server.settle()
        again = await complete(server, id_slot=5)
        assert again == (cold, warm_found, warm_computed)
        # And the same once more, now with nothing to write; the file of it is the same but for what was added.
        assert (await act(server, "restore", 5, filename="a.slot"))[0] == 200
        await server.settle()


async def test_what_does_not_fit_is_refused(tmp_path, small_toy, toy):
    """Another model, other numbers, other blocks, another format, a damaged, cut or foreign file: 400 that says so."""
    same_shape = write_toy_model(tmp_path / "other.gguf", ToyShape(context=1 << 15, seed=8))
    async with live(toy, slot_folder=str(tmp_path)) as server:
        answer, *_ = await complete(server, id_slot=0)
        assert (await act(server, "save", filename="a"))[0] == 200
        raw = (tmp_path / "a").read_bytes()
        middle = len(raw) // 2
        spoiled = {
            "cut": raw[:-1],
            "longer": raw + b"x",
            "flipped": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
            "empty": b"",
            "text": b"no slot at all, but a text of some length",
            "header": raw[:12] + b"\xff\xff\xff\x7f" + raw[16:],
            "json": raw[:16] + b"[" + raw[17:],
        }
        for name, content in spoiled.items():
            (tmp_path / name).write_bytes(content)
            status, body = await act(server, "restore", filename=name)
            assert (status, body["error"]["param"]) == (400, "filename"), name
            told = body["error"]["message"]
            assert "damaged" in told or "no saved prompt" in told, told
        (tmp_path / "later").write_bytes(raw[:8] + b"\x02" + raw[9:])
        assert (
            "version 2" in (await act(server, "restore", filename="later"))[1]["error"]["message"]
        )
        status, body = await act(server, "restore", filename="nothing")
        assert (status, "there is no" in body["error"]["message"]) == (400, True)
        await server.settle()
        # Nothing of the damaged files is found.
        assert (await complete(server))[0] == answer
    others = (
        (same_shape, EngineConfig(), "model file"),
        (toy, EngineConfig(memory=MemoryConfig(kv_type="f32")), "--kv-type"),
        (toy, EngineConfig(memory=MemoryConfig(block_tokens=8)), "size of blocks"),
    )
    for path, config, told in others:
        async with live(path, config, slot_folder=str(tmp_path)) as server:
            status, body = await act(server, "restore", filename="a")
            assert status == 400
            assert told in body["error"]["message"]


async def test_keys_that_turned_otherwise_are_refused(tmp_path):
    """By the factors of long contexts, where those of short ones are wanted."""
    toy = next(case.toy for case in ARCH_CASES if case.name == "phimoe_default")
    path = write_toy_arch(tmp_path / "model.gguf", toy)
    async with live(path, EngineConfig(placement=CPU), slot_folder=str(tmp_path)) as server:
        await complete(server, prompt="Every lane", id_slot=0)
        assert (await act(server, "save", filename="a"))[0] == 200
    short = EngineConfig(placement=CPU, memory=MemoryConfig(max_context_tokens=64))
    async with live(path, short, slot_folder=str(tmp_path)) as server:
        status, body = await act(server, "restore", filename="a")
        assert status == 400
        assert "--ctx" in body["error"]["message"]


@pytest.mark.parametrize(
    "name",
    ["", "../a", "a/b", "/etc/passwd", ".hidden", "a\\b", "a\0b", "a ", "a.", "x" * 200, "ü"],
)
async def test_names_stay_in_the_folder(tmp_path, small_toy, name):
    """Nothing is written anywhere for a name with separators, or a hidden one."""
    folder = tmp_path / "slots"
    folder.mkdir()
    async with live(small_toy, slot_folder=str(folder)) as server:
        await complete(server, prompt="a" * 40, max_tokens=1)
        for action in ("save", "restore"):
            status, body = await act(server, action, filename=name)
            assert (status, body["error"]["param"]) == (400, "filename")
    assert list(folder.iterdir()) == []
    assert [each.name for each in tmp_path.iterdir()] == ["slots"]


async def test_erasing_a_slot(tmp_path, small_toy):
    """Its tokens are computed again; what another slot shares stays."""
    async with live(small_toy, slot_folder=str(tmp_path)) as server:
        short = {"prompt": "b" * 40, "max_tokens": 1}
        await complete(server, id_slot=0, **short)
        await complete(server, id_slot=1, prompt="b" * 40 + "c" * 10, max_tokens=1)
        _, found, _ = await complete(server, id_slot=0, **short)
        assert found == 32
        status, body = await act(server, "erase", 0)
        assert (status, body) == (200, {"id_slot": 0, "n_erased": 32})
        assert (await complete(server, **short))[1] == 32
        await act(server, "erase", 1)
        for slot in range(4):
            await act(server, "erase", slot)
        assert (await complete(server, **short))[1] == 0
        assert (await act(server, "erase", 0))[0] == 200
        assert (await act(server, "save", 1, filename="a"))[0] == 400


async def test_slots_without_a_number(tmp_path, small_toy):
    """A conversation keeps its slot; another one gets another. Numbers that there are not are refused."""
    config = EngineConfig(scheduler=SchedulerConfig(max_requests=4))
    async with live(small_toy, config, slot_folder=str(tmp_path)) as server:
        await complete(server, prompt="a" * 32, max_tokens=1)
        await complete(server, prompt="b" * 32, max_tokens=1)
        await complete(server, prompt="a" * 48, max_tokens=1)
        sizes = [(await act(server, "save", n, filename=f"s{n}")) for n in range(3)]
        assert [status for status, _ in sizes] == [200, 200, 400]
        assert sizes[0][1]["n_saved"] == 48
        assert sizes[1][1]["n_saved"] == 32
        for status, body in (
            await act(server, "save", 4, filename="x"),
            await server.post("/v1/completions", **ASKED | {"prompt": "a", "id_slot": 4}),
            await server.post("/v1/completions", **ASKED | {"prompt": "a", "id_slot": -2}),
        ):
            assert (status, body["error"]["param"]) == (400, "id_slot")
        assert (await server.post("/slots/0?action=fly", filename="a"))[0] == 400
    async with live(small_toy) as server:
        assert (await act(server, "save", filename="a"))[0] == 501


async def test_files_have_a_limit_and_are_private(tmp_path, small_toy):
    """All files together; one that is replaced does not count. A refused save leaves nothing."""
    async with live(small_toy, slot_folder=str(tmp_path)) as server:
        await complete(server, prompt="a" * 40, max_tokens=1)
        size = (await act(server, "save", filename="a"))[1]["n_written"]
        assert (tmp_path / "a").stat().st_mode & 0o077 == 0
    limit = size + size // 2
    async with live(small_toy, slot_folder=str(tmp_path), max_slots_bytes=limit) as server:
        await complete(server, prompt="a" * 40, max_tokens=1)
        assert (await act(server, "save", filename="a"))[0] == 200
        status, body = await act(server, "save", filename="b")
        assert (status, "--slot-save-limit" in body["error"]["message"]) == (400, True)
        assert [each.name for each in tmp_path.iterdir()] == ["a"]


async def test_another_key_does_not_see_a_slot(tmp_path, small_toy):
    """Neither in memory nor in a file."""
    keys = ("first", "second")
    async with live(small_toy, slot_folder=str(tmp_path), api_keys=keys) as server:

        async def post(key: str, path: str, **fields) -> tuple[int, dict]:
            headers = {"Authorization": f"Bearer {key}"}
            async with server.client.post(path, json=fields, headers=headers) as response:
                return response.status, await response.json()

        asked = ASKED | {"prompt": "a" * 40, "max_tokens": 1, "id_slot": 0}
        assert (await post("first", "/v1/completions", **asked))[0] == 200
        assert (await post("second", "/slots/0?action=save", filename="a"))[0] == 400
        assert (await post("first", "/slots/0?action=save", filename="a"))[0] == 200
        status, body = await post("second", "/slots/1?action=restore", filename="a")
        assert (status, "another API key" in body["error"]["message"]) == (400, True)
        assert (await post("second", "/slots/0?action=erase"))[1]["n_erased"] == 0
        assert (await post("first", "/slots/0?action=erase"))[1]["n_erased"] == 32


async def test_requests_go_on_while_slots_are_saved_and_restored(tmp_path, toy):
    """Ten saves and restores beside running answers: each is what it is alone, and nothing is left held."""
    async with live(toy, slot_folder=str(tmp_path)) as server:
        alone, *_ = await complete(server, id_slot=0)
        other = {"prompt": "z" * 300, "max_tokens": 30}
        beside, *_ = await complete(server, id_slot=1, **other)

        async def files() -> None:
            for number in range(5):
                assert (await act(server, "save", 0, filename=f"f{number}"))[0] == 200
                assert (await act(server, "erase", 0))[0] == 200
                assert (await act(server, "restore", 0, filename=f"f{number}"))[0] == 200

        async def answers() -> None:
            for _ in range(6):
                assert (await complete(server, id_slot=1, **other))[0] == beside

        await asyncio.gather(files(), answers())
        assert (await complete(server, id_slot=0))[0] == alone
        await server.settle()


async def test_a_cache_without_room_says_so(tmp_path, small_toy):
    """429 while others hold the blocks; the slot can be restored afterwards."""
    memory = MemoryConfig(max_full_contexts=1)
    async with live(small_toy, EngineConfig(memory=memory), slot_folder=str(tmp_path)) as server:
        await complete(server, id_slot=0, prompt="a" * 48, max_tokens=1)
        assert (await act(server, "save", filename="a"))[0] == 200
        await act(server, "erase", 0)
        others = SequenceTokens(tuple(range(32)), b"other", 32)
        call = server.engine._thread.call
        held = await call(lambda loop: loop.slots.begin_restore(others, PrefixParts(2)))
        status, body = await act(server, "restore", filename="a")
        assert (status, body["error"]["code"]) == (429, "queue_full")
        await call(lambda loop: loop.slots.give_back(held))
        assert (await act(server, "restore", filename="a"))[0] == 200


async def test_a_cache_on_a_device_is_refused(tmp_path, small_toy):
    """The error says where it can be saved."""
    placement = PlacementConfig(hot_device="none", trunk_device="torch-cpu")
    config = EngineConfig(placement=placement)
    async with live(small_toy, config, slot_folder=str(tmp_path)) as server:
        await complete(server, id_slot=0, prompt="a" * 40, max_tokens=1)
        status, body = await act(server, "save", filename="a")
        assert (status, "--trunk-device cpu" in body["error"]["message"]) == (400, True)


async def test_restoring_loads_the_model(tmp_path, toy):
    """With several models, each keeps its own slots."""
    (tmp_path / "m").mkdir()
    (tmp_path / "slots").mkdir()
    shutil.copy(toy, tmp_path / "m" / "one.gguf")
    write_toy_model(tmp_path / "m" / "two.gguf", ToyShape(context=1 << 15, seed=3))
    settings = {"slot_folder": str(tmp_path / "slots")}
    said = {"messages": [{"role": "user", "content": PROMPT}], "id_slot": 0, "max_tokens": 3}
    async with several(folder_of(tmp_path / "m"), **settings) as server:
        before = await server.chat("one", **said)
        assert (await act(server, "save", filename="a", model="one"))[0] == 200
    async with several(folder_of(tmp_path / "m"), **settings) as server:
        assert (await act(server, "restore", filename="a", model="two"))[0] == 400
        assert server.states()["one"] == "unloaded"
        assert (await act(server, "restore", filename="a", model="one"))[0] == 200
        after = await server.chat("one", **said)
        assert after["choices"] == before["choices"]
        assert after["timings"]["cache_n"] > 200
