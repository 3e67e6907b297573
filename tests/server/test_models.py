"""Several models in one server: loading, unloading, and who waits."""

from __future__ import annotations

import asyncio
import shutil
from random import Random

import ollama
import pytest

from tests.server.live import CHAT, HELLO, until
from tests.server.metrics.test_metrics import scrape
from tests.server.several import Several, folder_of, several
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import EngineConfig
from thermocline.engine import thread as engine_thread
from thermocline.engine.needs import model_needs
from thermocline.server.core.catalogue import open_catalogue


@pytest.fixture(scope="session")
def models(tmp_path_factory, toy):
    """A folder of three models of one size with different weights."""
    folder = tmp_path_factory.mktemp("several")
    shutil.copy(toy, folder / "one.gguf")
    for seed, name in enumerate(("two", "org/three"), 1):
        path = folder / f"{name}.gguf"
        path.parent.mkdir(exist_ok=True)
        write_toy_model(path, ToyShape(context=1 << 15, seed=seed))
    return folder


def room_for(models, count: int) -> int:
    """Return memory for so many of the models."""
    return count * model_needs(models / "one.gguf", EngineConfig()).host_bytes


async def test_a_model_is_loaded_by_the_request_that_names_it(models):
    """And only that one; each answers as it does alone, and lists tell what is loaded."""
    async with several(folder_of(models)) as server:
        assert server.states() == {"one": "unloaded", "org/three": "unloaded", "two": "unloaded"}
        texts = {}
        for name in ("one", "two"):
            answer = await server.chat(name, max_tokens=8, ignore_eos=True)
            assert answer["model"] == name
            texts[name] = answer["choices"][0]["message"]["content"]
        assert texts["one"] != texts["two"]
        assert server.states() == {"one": "loaded", "org/three": "unloaded", "two": "loaded"}
        _, listed = await server.get("/v1/models")
        by_id = {model["id"]: model for model in listed["data"]}
        assert by_id.keys() == {"one", "two", "org/three"}
        assert by_id["org/three"]["status"] == {"value": "unloaded"}
        assert "meta" not in by_id["org/three"]
        assert by_id["one"]["meta"]["n_ctx"] > 0
        assert (await server.get("/v1/models/org/three"))[1] == by_id["org/three"]
        _, health = await server.get("/health")
        assert health == {"status": "ok", "models": server.states()}
        assert (await server.get("/health?model=one"))[0] == 200
        assert (await server.get("/health?model=org/three"))[0] == 503


async def test_a_request_without_a_name(models):
    """Nothing says which is meant until one is loaded; a name that there is not is 404."""
    async with several(folder_of(models)) as server:
        status, body = await server.post(CHAT, messages=HELLO)
        assert (status, body["error"]["param"]) == (400, "model")
        status, body = await server.post(CHAT, messages=HELLO, model="four")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "'org/three'" in body["error"]["message"]
        assert (await server.get("/props"))[0] == 503
        await server.chat("two", max_tokens=1)
        assert (await server.chat("", max_tokens=1))["model"] == "two"
        assert (await server.get("/props"))[1]["model_alias"] == "two"
        await server.chat("one", max_tokens=1)
        assert (await server.get("/props"))[1]["model_alias"] == "one"
        assert (await server.get("/props?model=two"))[1]["model_alias"] == "two"


async def test_the_least_recently_used_makes_room(models):
    """Two fit; the third unloads the one that nobody asked for longest."""
    async with several(folder_of(models), models_memory_bytes=room_for(models, 2)) as server:
        for name in ("one", "two", "one", "org/three"):
            await server.chat(name, max_tokens=1)
        assert server.states() == {"one": "loaded", "org/three": "loaded", "two": "unloaded"}
        await server.chat("two", max_tokens=1)
        assert server.states() == {"one": "unloaded", "org/three": "loaded", "two": "loaded"}
        found = await scrape(server.client)
        assert found["model_loads_total", "two"] == 2
        assert found["model_unloads_total", "one", "memory"] == 1
        assert found["models_memory_bytes", "used"] == found["models_memory_bytes", "budget"]
        assert found["tokens_predicted_total", "one"] == 2
        assert (found["is_ready", "two"], found["is_ready", "one"]) == (1, 0)


async def test_a_running_answer_is_never_cut_by_another_model(models, gate):
    """Who needs its room waits, and so does who comes for the busy one after that; all are answered."""
    async with several(folder_of(models), models_memory_bytes=room_for(models, 1)) as server:
        first = asyncio.create_task(server.chat("one", max_tokens=4, ignore_eos=True))
        await until(lambda: gate.num_calls > 0)
        second = asyncio.create_task(server.chat("two", max_tokens=4, ignore_eos=True))
        places = server.pool._places
        await until(lambda: places["one"].is_leaving)
        third = asyncio.create_task(server.chat("one", max_tokens=4, ignore_eos=True))
        await until(lambda: len(places["one"].waiting) == 1)
        assert server.states()["two"] == "unloaded"
        assert len(places["one"].users) == 1
        gate.open()
        answers = await asyncio.gather(first, second, third)
        assert [answer["model"] for answer in answers] == ["one", "two", "one"]
        assert answers[0]["choices"] == answers[2]["choices"]
        assert server.pool.total_loads == {"one": 2, "two": 1}


async def test_who_waits_too_long_is_told_to_come_again(models, gate):
    """503 with Retry-After; the busy model goes on, and takes requests again."""
    settings = {"models_memory_bytes": room_for(models, 1), "load_timeout_s": 0.2}
    async with several(folder_of(models), **settings) as server:
        await server.pool.lease("one")  # opening may take longer than the timeout
        running = asyncio.create_task(server.chat("one", max_tokens=2))
        await until(lambda: gate.num_calls > 0)
        async with server.client.post(CHAT, json={"messages": HELLO, "model": "two"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            error = (await response.json())["error"]
        assert error["code"] == "model_not_loaded"
        assert "'one'" in error["message"]
        later = asyncio.create_task(server.chat("one", max_tokens=2))
        await until(lambda: len(server.pool._places["one"].users) == 3)
        gate.open()
        await asyncio.gather(running, later)
        for lease in tuple(server.pool._places["one"].users):
            lease.release()


async def test_a_client_that_leaves_does_not_leave_its_wish(models, gate):
    """The model that it waited for is not loaded, and the other one stays."""
    async with several(folder_of(models), models_memory_bytes=room_for(models, 1)) as server:
        running = asyncio.create_task(server.chat("one", max_tokens=2))
        await until(lambda: gate.num_calls > 0)
        waiting = asyncio.create_task(server.chat("two", max_tokens=2))
        await until(lambda: server.pool._places["one"].is_leaving)
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(lambda: not server.pool._places["two"].waiting)
        await until(lambda: not server.pool._places["one"].is_leaving)
        gate.open()
        await running
        await server.chat("one", max_tokens=1)
        assert server.pool.total_loads == {"one": 1}


async def test_keep_alive_is_ollama_s(models):
    """Seconds after the last request; 0 unloads at the answer's end, -1 never; an empty request loads or unloads."""
    say = {"messages": HELLO, "stream": False, "options": {"num_predict": 1}}
    async with several(folder_of(models), keep_alive_s=0.0) as server:
        await server.post("/api/chat", model="one", **say)
        await until(lambda: server.states()["one"] == "unloaded")
        await server.post("/api/chat", model="one:latest", keep_alive=-1, **say)
        await server.post("/api/chat", model="two", keep_alive="0.05s", **say)
        await until(lambda: server.states()["two"] == "unloaded")
        assert server.states()["one"] == "loaded"
        _, body = await server.post("/api/generate", model="one", keep_alive=0)
        assert (body["done"], body["done_reason"]) == (True, "unload")
        await until(lambda: server.states()["one"] == "unloaded")
        _, body = await server.post("/api/generate", model="one", keep_alive="10m")
        assert body["done_reason"] == "load"
        assert server.states()["one"] == "loaded"
        status, body = await server.post("/api/generate", model="one", keep_alive="soon")
        assert (status, "keep_alive" in body["error"]) == (400, True)
        assert server.pool.total_unloads["one", "asked"] == 2


async def test_what_runs_is_not_unloaded_by_keep_alive(models, gate):
    """Its time begins when its last answer ends."""
    async with several(folder_of(models), keep_alive_s=0.0) as server:
        running = asyncio.create_task(server.chat("one", max_tokens=3))
        await until(lambda: gate.num_calls > 0)
        await server.post("/api/generate", model="one", keep_alive=0)
        assert server.states()["one"] == "loaded"
        gate.open()
        assert (await running)["usage"]["completion_tokens"] == 3
        await until(lambda: server.states()["one"] == "unloaded")


async def test_ollama_s_client_sees_all_models(models):
    """list, ps, show and a load by name, through its own types."""
    async with (
        several(folder_of(models)) as server,
        ollama.AsyncClient(host=server.server.url) as client,
    ):
        listed = await client.list()
        assert {model.model for model in listed.models} == {"one", "two", "org/three"}
        assert all(model.size > 0 and model.digest for model in listed.models)
        assert listed.models[0].details.family == "qwen3moe"
        assert (await client.ps()).models == []
        unloaded = await client.show("two")
        assert server.states()["two"] == "unloaded"
        await client.chat("two", messages=HELLO, options={"num_predict": 1}, keep_alive="10m")
        (running,) = (await client.ps()).models
        assert running.model == "two"
        until_s = (running.expires_at - listed.models[0].modified_at).total_seconds()
        assert until_s > 0
        shown = await client.show("two")
        assert shown.modelinfo == unloaded.modelinfo
        assert shown.capabilities == unloaded.capabilities
        await client.generate("two", keep_alive=0)
        await until(lambda: server.states()["two"] == "unloaded")


async def test_a_model_that_can_not_be_loaded_is_told_and_tried_again(models, tmp_path):
    """503 with the reason; the others answer; when the file is whole, so does this one."""
    shutil.copytree(models, tmp_path / "m")
    broken = tmp_path / "m" / "two.gguf"
    whole = broken.read_bytes()
    async with several(folder_of(tmp_path / "m")) as server:
        broken.write_bytes(whole[: len(whole) // 2])
        status, body = await server.post(CHAT, messages=HELLO, model="two")
        assert (status, body["error"]["code"]) == (503, "model_not_loaded")
        assert "two.gguf" in body["error"]["message"]
        await server.chat("one", max_tokens=1)
        broken.write_bytes(whole)
        await server.chat("two", max_tokens=1)


async def test_an_engine_that_dies_is_loaded_again(models, monkeypatch):
    """The request that it failed gets the error, the next one a new engine."""
    async with several(folder_of(models)) as server:
        await server.chat("one", max_tokens=1)
        model = server.pool.opened("one")

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug, as told")

        monkeypatch.setattr(model.engine._parts.step_loop._scheduler, "commit", fail)
        assert (await server.post(CHAT, messages=HELLO, model="one"))[0] == 500
        await asyncio.to_thread(model.engine._thread.join)
        await server.chat("one", max_tokens=1)
        assert server.pool.total_loads["one"] == 2


async def test_files_that_come_are_served(models, tmp_path, small_toy):
    """Without a restart: a name that was not known is looked for."""
    shutil.copytree(models, tmp_path / "m")
    async with several(folder_of(tmp_path / "m")) as server:
        assert (await server.post(CHAT, messages=HELLO, model="new"))[0] == 404
        shutil.copy(small_toy, tmp_path / "m" / "new.gguf")
        await server.chat("new", max_tokens=1)
        (tmp_path / "m" / "two.gguf").unlink()
        _, listed = await server.get("/v1/models")
        assert "two" not in {model["id"] for model in listed["data"]}


async def test_the_feed_says_that_nothing_is_loaded(models):
    """Until a request loads a model; a recorded model stays until the recording ends."""
    async with several(folder_of(models), keep_alive_s=0.0) as server:
        async with server.client.get("/events") as response:
            event = await response.content.readuntil(b"\n\n")
        assert b'"state":"idle"' in event
        assert (await server.post("/trace/start"))[0] == 503
        held = await server.pool.lease("one")
        assert (await server.post("/trace/start"))[0] == 200
        held.release()
        await server.chat("one", max_tokens=2)
        assert server.states()["one"] == "loaded"
        assert (await server.post("/trace/start"))[0] == 409
        _, window = await server.post("/trace/stop")
        assert window["events"] > 0
        await until(lambda: server.states()["one"] == "unloaded")


async def test_closing_while_a_model_loads_and_another_waits(models, monkeypatch):
    """Nobody hangs: the waiting request gets an answer."""
    begun, opened = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    real = engine_thread.load_parts

    def slow(*args):
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(opened.wait(), loop).result(10)
        return real(*args)

    monkeypatch.setattr(engine_thread, "load_parts", slow)
    catalogue = open_catalogue([models], EngineConfig(), with_cache=False)
    settings = {"models_memory_bytes": room_for(models, 1), "shutdown_timeout_s": 0.05}
    async with several(catalogue, **settings) as server:
        first = asyncio.create_task(server.post(CHAT, messages=HELLO, model="one"))
        await begun.wait()
        second = asyncio.create_task(server.post(CHAT, messages=HELLO, model="two"))
        await until(lambda: server.pool._places["two"].waiting)
        opened.set()
        done = await asyncio.gather(first, second, return_exceptions=True)
    statuses = [each[0] for each in done]
    assert statuses == [200, 200] or 503 in statuses


class Watch:
    """Notes at each load how much memory the models then take by plan; between loads it only shrinks."""

    def __init__(self, server: Several, monkeypatch) -> None:
        self.most_bytes = 0
        pool, real = server.pool, server.pool._open

        def opened(name, place):
            backend = real(name, place)
            states = [state for state in pool.states() if state.state != "unloaded"]
            self.most_bytes = max(self.most_bytes, sum(state.host_bytes for state in states))
            return backend

        monkeypatch.setattr(pool, "_open", opened)


@pytest.mark.slow
async def test_two_models_under_load_with_unloading(models, monkeypatch):
    """40 requests by 8 clients, memory for one model: none is lost, each is answered as alone, memory stays in the plan."""
    budget = room_for(models, 1)
    wanted = {}
    async with several(folder_of(models)) as server:
        for name in ("one", "two"):
            answer = await server.chat(name, max_tokens=6, ignore_eos=True)
            wanted[name] = answer["choices"][0]["message"]["content"]
    async with several(folder_of(models), models_memory_bytes=budget, keep_alive_s=0.01) as server:
        watch = Watch(server, monkeypatch)

        async def client(number: int) -> None:
            for turn in range(5):
                name = ("one", "two")[(number + turn) % 2]
                answer = await server.chat(name, max_tokens=6, ignore_eos=True)
                assert answer["model"] == name
                assert answer["choices"][0]["message"]["content"] == wanted[name]

        await asyncio.gather(*map(client, range(8)))
        assert 0 < watch.most_bytes <= budget
        assert min(server.pool.total_loads[name] for name in wanted) >= 2


@pytest.mark.slow
async def test_clients_that_leave_at_any_moment(models, monkeypatch):
    """60 requests for three models with room for two, of which every second leaves: the others are answered, nobody is held."""
    budget = room_for(models, 2)
    random = Random(24)
    answered = Answered()
    settings = {"models_memory_bytes": budget, "keep_alive_s": 0.005}
    async with several(folder_of(models), **settings) as server:
        watch = Watch(server, monkeypatch)

        async def ask(number: int) -> None:
            name = random.choice(("one", "two", "org/three"))
            is_leaving, begin = number % 2, number // 4
            await answered.wait(begin)
            asking = asyncio.create_task(server.chat(name, max_tokens=random.randrange(1, 20)))
            if is_leaving:
                await answered.wait(begin + random.randrange(4))
                asking.cancel()
                await asyncio.wait({asking})
            else:
                assert (await asking)["usage"]["completion_tokens"] > 0
                await answered.add()

        await asyncio.gather(*map(ask, range(60)))
        assert answered.count == 30
        assert 0 < watch.most_bytes <= budget
        loads, unloads = server.pool.total_loads, server.pool.total_unloads
        await until(lambda: sum(loads.values()) == sum(unloads.values()))
        assert set(server.states().values()) == {"unloaded"}


class Answered:
    """Counts answers, and lets others wait for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self._more = asyncio.Condition()

    async def add(self) -> None:
        """Count one more."""
        async with self._more:
            self.count += 1
            self._more.notify_all()

    async def wait(self, count: int) -> None:
        """Wait until there are so many."""
        async with self._more:
            await self._more.wait_for(lambda: self.count >= count)
