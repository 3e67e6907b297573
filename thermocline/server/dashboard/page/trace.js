"use strict";
// The last request's timeline: started and stopped around an answer, drawn by the offline page's own code.

class TracePanel {
  constructor() {
    this.byId = (id) => document.getElementById(id);
    this.timeline = null;
    this.said = "";
    this.isRecording = false;
    this.stopping = Promise.resolve();
    // Otherwise the server would record on, and refuse the next one.
    window.addEventListener("pagehide", () => {
      if (this.isRecording) request("/trace/stop", { method: "POST", keepalive: true }).catch(() => {});
    });
    this.byId("trace-fit").addEventListener("click", () => this.timeline.show(0, this.timeline.model.length));
    this.byId("trace-save").addEventListener("click", () => this.save());
    this.byId("trace-counters").addEventListener("click", () => {
      this.timeline.setCounters(!this.timeline.showsCounters);
      this.byId("trace-counters").setAttribute("aria-pressed", this.timeline.showsCounters);
    });
    window.addEventListener("resize", () => this.timeline?.resize());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.timeline?.resize());
  }

  note(text) {
    this.byId("trace-note").textContent = text;
  }

  // Whether a recording of ours has begun; another's is left alone.
  async start() {
    await this.stopping;
    try {
      await request("/trace/start", { method: "POST" });
      this.isRecording = true;
      this.note("Recording.");
      return true;
    } catch (error) {
      this.note(error instanceof ServerError ? `Not recorded: ${error.message}.` : "Not recorded: the server does not answer.");
      return false;
    }
  }

  // isWanted: a request that failed leaves no timeline, and the last one stays.
  async stop(isWanted) {
    this.isRecording = false;
    const stopped = request("/trace/stop", { method: "POST" });
    this.stopping = stopped.catch(() => {});
    try {
      const window = await (await stopped).json();
      if (!isWanted || !window.events) {
        this.note(this.timeline ? `${this.said} The last request failed and left no timeline.` : "The request failed and left no timeline.");
        return;
      }
      this.note("Drawing the timeline.");
      const data = await (await request("/trace/last?format=timeline")).json();
      this.show(data, window);
    } catch (error) {
      this.note(error instanceof ServerError ? `No timeline: ${error.message}.` : "No timeline: the server does not answer.");
    }
  }

  show(data, { dropped }) {
    const model = makeModel(data);
    // A canvas of its own for each timeline: its listeners go with it.
    const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": "Lanes over time. Keys: w and s zoom, a and d move, 0 shows all" });
    this.byId("trace-place").replaceChildren(canvas);
    const timeline = new Timeline(model, canvas);
    this.timeline = timeline;
    const select = ({ chunk = -1, name = -1, path = false }) => {
      timeline.lit = { chunk, name, path };
      timeline.redraw();
    };
    wirePointer(timeline, model, select);
    wireKeys(timeline, model, select, canvas);
    this.showLegend(model);
    const { verdict, answers, schedule, overlapped_share: overlapped } = model.report;
    const figures = [`${formatTime(model.report.wall_ns)} recorded`, `${formatShare(overlapped)} of the working time in parallel`,
      `schedule efficiency ${formatShare(schedule.total.efficiency)}`];
    if (answers.tokens_per_s !== null) figures.unshift(`${formatSpeed(answers.tokens_per_s)} tokens/s`);
    if (answers.ttft_ns !== null) figures.unshift(`first token after ${formatTime(answers.ttft_ns)}`);
    this.byId("trace-verdict").textContent = verdict;
    this.said = `${figures.join(", ")}.${dropped ? ` The oldest ${dropped.toLocaleString("en")} events had no room.` : ""}`;
    this.note(`${this.said} Wheel: zoom, drag: move, click: follow a chunk.`);
    this.byId("trace-counters").setAttribute("aria-pressed", false);
    for (const id of ["trace-counters", "trace-fit", "trace-save"]) this.byId(id).disabled = false;
  }

  showLegend(model) {
    const used = new Set(model.tracks.flatMap((track) => [...new Set(track.name)]));
    this.byId("trace-legend").replaceChildren(...[...used].map((index) => {
      const swatch = element("i", {});
      swatch.style.background = stageColor(model.names[index]);
      return element("span", {}, swatch, model.names[index]);
    }));
  }

  async save() {
    const page = await (await request("/trace/last?format=html")).blob();
    const link = element("a", { href: URL.createObjectURL(page), download: "thermocline-timeline.html" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}
