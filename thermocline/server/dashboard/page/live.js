"use strict";
// What the server does now: state, speed, lanes, requests and memory, out of the events of /events.

const SPARK_POINTS = 180; // a minute at three events a second

// What a lane of the timeline is to who does not know its name.
const LANE_WORDS = {
  loop: "bookkeeping", scheduler: "planning", draft: "drafting tokens", "gpu.compute": "GPU", "gpu.h2d": "copies to the GPU",
  hot: "hot experts' device", pagecache: "reading the file", remote: "expert workers",
};

function laneWords(lane) {
  const [name, number] = lane.split(" ");
  return name === "cpu" ? `CPU thread ${Number(number ?? 0) + 1}` : LANE_WORDS[name] ?? lane;
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (bytes >= 1024 && step < units.length - 1) {
    bytes /= 1024;
    step += 1;
  }
  return `${step === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${units[step]}`;
}

function formatSpeed(speed) {
  return speed >= 100 ? String(Math.round(speed)) : speed.toFixed(1);
}

// Draws into a canvas at the screen's own resolution; returns the context and the size in the page's pixels.
function prepareCanvas(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return [context, width];
}

function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

class LiveView {
  constructor() {
    this.speeds = [];
    this.byId = (id) => document.getElementById(id);
    this.rows = new Map();
  }

  show(event) {
    document.title = `${event.model} - thermocline`;
    this.byId("model").textContent = event.model;
    const load = event.load;
    this.byId("load").hidden = !load;
    if (load) {
      this.byId("load").value = load.done / load.total;
      this.say("loading", `loading: ${load.step ?? "starting"} (${load.done + 1} of ${load.total}), ${load.seconds.toFixed(1)} s`);
    } else if (event.state === "ready") {
      this.showReady(event);
    } else {
      this.say(event.state, event.error);
    }
  }

  say(state, text) {
    const node = this.byId("state");
    node.dataset.state = state;
    if (node.textContent !== text) node.textContent = text;
  }

  showReady(event) {
    const { tokens, queue } = event;
    const speed = (tokens.output_per_second ?? 0);
    this.say("ready", event.tracing ? "ready, recording a timeline" : "ready");
    this.byId("speed").textContent = speed ? formatSpeed(speed) : "0";
    this.speeds.push(speed);
    if (this.speeds.length > SPARK_POINTS) this.speeds.shift();
    this.drawSpark();
    this.showFacts(event);
    this.showRequests(event.requests, queue);
    this.showLanes(event.lanes);
  }

  drawSpark() {
    const height = 44;
    const [context, width] = prepareCanvas(this.byId("spark"), height);
    const high = Math.max(...this.speeds, 1);
    const x = (index) => width - ((this.speeds.length - 1 - index) * width) / (SPARK_POINTS - 1);
    const y = (speed) => height - 2 - (speed / high) * (height - 6);
    context.beginPath();
    context.moveTo(x(0), height);
    this.speeds.forEach((speed, index) => context.lineTo(x(index), y(speed)));
    context.lineTo(width, height);
    context.fillStyle = `rgb(${themeColor("--heat")} / 0.18)`;
    context.fill();
    context.beginPath();
    this.speeds.forEach((speed, index) => context.lineTo(x(index), y(speed)));
    context.strokeStyle = themeColor("--accent");
    context.lineWidth = 1.5;
    context.stroke();
  }

  showFacts({ tokens, queue, kv, drafts, experts, memory }) {
    const prompt = tokens.prompt_per_second ?? 0;
    const facts = [
      ["reading prompts, tokens/s", prompt ? formatSpeed(prompt) : "0"],
      ["requests running / waiting", `${queue.running} / ${queue.waiting}`],
      ["blocks of context in use", `${kv.held} of ${kv.blocks}`],
      ["cached prompt blocks", String(kv.cached)],
      ["prompts found in cache", kv.prefix_hit_share === null ? "none yet" : formatShare(kv.prefix_hit_share)],
      ["experts in memory", expertsInMemory(experts.memory)],
      ["this process", formatBytes(memory.process_bytes)],
      ["memory left", formatBytes(memory.available_bytes)],
    ];
    if (drafts.drafted) facts.splice(5, 0, ["drafted tokens accepted", formatShare(drafts.accepted / drafts.drafted)]);
    if (experts.hot) facts.splice(-2, 0, ["choices of hot experts", formatShare(experts.hot_share)]);
    const list = this.byId("facts");
    if (list.childElementCount !== facts.length) {
      list.replaceChildren(...facts.map(([name]) => element("div", {}, element("dt", {}, name), element("dd", {}))));
    }
    facts.forEach(([name, value], index) => {
      const [dt, dd] = list.children[index].children;
      dt.textContent = name;
      dd.textContent = value;
    });
  }

  showRequests(requests, queue) {
    const shown = requests.slice(0, 6);
    const rows = shown.map((each) => {
      const isPrompt = each.prompt_computed < each.prompt_tokens;
      const bar = element("span", { class: "track" }, element("i", {}));
      bar.firstChild.style.width = `${(each.prompt_computed / each.prompt_tokens) * 100}%`;
      const text = isPrompt ? `${each.prompt_computed} of ${each.prompt_tokens} prompt tokens` : `${each.output_tokens} tokens`;
      const state = { waiting: "waiting", prefill: "reading", decode: "writing" }[each.state];
      return element("li", {}, element("span", { class: "name" }, `#${each.id} ${state}`), bar, element("span", {}, text));
    });
    const more = queue.running + queue.waiting - shown.length;
    if (more > 0) rows.push(element("li", {}, element("span", { class: "name" }, `and ${more} more`)));
    this.byId("requests").replaceChildren(...rows);
  }

  showLanes(lanes) {
    const labels = lanes.map((lane) => lane.lane).join("\n");
    if (this.labels !== labels) {
      this.labels = labels;
      this.rows.clear();
      const cells = lanes.flatMap(({ lane, work }) => {
        const kind = work ? "" : "rest";
        const bar = element("div", { class: `track ${kind}`, role: "meter", "aria-label": laneWords(lane), "aria-valuemin": 0, "aria-valuemax": 100 }, element("i", {}));
        const share = element("span", { class: `share ${kind}` });
        this.rows.set(lane, { bar, share });
        return [element("span", { class: kind, title: `lane ${lane}` }, laneWords(lane)), bar, share];
      });
      this.byId("lanes").replaceChildren(...cells);
    }
    for (const { lane, busy } of lanes) {
      const { bar, share } = this.rows.get(lane);
      const percent = Math.round((busy ?? 0) * 100);
      bar.firstChild.style.width = `${percent}%`;
      bar.setAttribute("aria-valuenow", percent);
      share.textContent = `${percent}%`;
    }
  }
}

function expertsInMemory(memory) {
  if (!memory) return "not looked at";
  if (memory.resident) return "all";
  if (memory.hit_share === null) return memory.needless ? "all" : "none yet";
  return `${formatShare(memory.hit_share)} when needed`;
}

// Calls `onEvent` with each event while the page is seen, whatever happens to the server in between.
async function followEvents(onEvent, onAway) {
  for (;;) {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    const leaving = new AbortController();
    let wantsKey = false;
    const onHide = () => document.hidden && leaving.abort();
    document.addEventListener("visibilitychange", onHide);
    try {
      const response = await request("/events", { signal: leaving.signal });
      for await (const event of readEvents(response)) onEvent(event);
      onAway("the server has ended the connection");
    } catch (error) {
      wantsKey = error.status === 401;
      if (!leaving.signal.aborted) onAway(error instanceof ServerError ? error.message : "the server does not answer");
    } finally {
      document.removeEventListener("visibilitychange", onHide);
    }
    // Whoever has closed the question for the key is asked again when they come back to the page.
    if (wantsKey) await new Promise((resolve) => document.addEventListener("pointerdown", resolve, { once: true }));
    else if (!leaving.signal.aborted) await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}
