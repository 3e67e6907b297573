// Wires the page up: buttons, and the part of the address after "#", which names a view.

function drawLegend(model, select) {
  const used = new Set(model.tracks.flatMap((track) => [...new Set(track.name)]));
  const order = Object.keys(PALETTE);
  const place = (name) => (order.indexOf(name) + order.length + 1) % (order.length + 1);
  const names = [...used].sort((a, b) => place(model.names[a]) - place(model.names[b]));
  const legend = document.getElementById("legend");
  legend.replaceChildren(...names.map((index) => {
    const swatch = element("i", { style: `background:${stageColor(model.names[index])}` });
    const button = element("button", { type: "button", "data-name": index, onclick: () => select({ name: index }) }, swatch, model.names[index]);
    return element("li", {}, button);
  }));
}

function readAddress() {
  const values = new URLSearchParams(location.hash.slice(1));
  const number = (name, otherwise) => (values.has(name) && isFinite(values.get(name)) ? Number(values.get(name)) : otherwise);
  return { from: number("from", NaN) * 1e6, to: number("to", NaN) * 1e6, chunk: number("chunk", -1), path: values.has("path"), byChunk: values.has("bychunk") };
}

function writeAddress(timeline) {
  const values = [`from=${(timeline.from / 1e6).toFixed(6)}`, `to=${(timeline.to / 1e6).toFixed(6)}`];
  if (timeline.lit.chunk >= 0) values.push(`chunk=${timeline.lit.chunk}`);
  if (timeline.lit.path) values.push("path");
  if (timeline.byChunk) values.push("bychunk");
  history.replaceState(null, "", "#" + values.join("&"));
}

function chunkWindow(model, chunk) {
  let [from, to] = [Infinity, -Infinity];
  for (const track of model.tracks) {
    for (let i = 0; i < track.count; i++) {
      if (track.chunk[i] !== chunk) continue;
      from = Math.min(from, track.start[i]);
      to = Math.max(to, track.end[i]);
    }
  }
  return [from, to];
}

async function main() {
  const model = makeModel(await unpack(document.getElementById("data").textContent));
  const byId = (id) => document.getElementById(id);
  const timeline = new Timeline(model, byId("canvas"));
  let timer = 0;
  timeline.onShow = () => {
    clearTimeout(timer);
    timer = setTimeout(() => writeAddress(timeline), 250);
  };
  const select = ({ chunk = -1, name = -1, path = false }) => {
    const isSame = name >= 0 && timeline.lit.name === name;
    timeline.lit = { chunk, name: isSame ? -1 : name, path };
    for (const button of document.querySelectorAll("#legend button")) button.setAttribute("aria-pressed", Number(button.dataset.name) === timeline.lit.name);
    byId("path").setAttribute("aria-pressed", path);
    const bound = model.report.schedule.chunks.find((candidate) => candidate.chunk === chunk);
    byId("selection").textContent = bound
      ? `Chunk ${chunk}${bound.kind ? ` (${bound.kind}, ${bound.tokens} tokens)` : ""} took ${formatTime(bound.makespan_ns)}, at best ${formatTime(bound.bound_ns)}.` : "";
    timeline.redraw();
    timeline.onShow();
  };
  const colorBy = (byChunk) => {
    timeline.byChunk = byChunk;
    byId("by-chunk").setAttribute("aria-pressed", byChunk);
    byId("by-stage").setAttribute("aria-pressed", !byChunk);
    timeline.redraw();
    timeline.onShow();
  };
  const selectAndShow = (chunk) => {
    select({ chunk });
    const [from, to] = chunkWindow(model, chunk);
    timeline.show(from - (to - from) * 0.05, to + (to - from) * 0.05);
    timeline.canvas.scrollIntoView({ block: "nearest" });
  };
  byId("counters").hidden = !model.counters.length;
  byId("counters").addEventListener("click", () => {
    timeline.setCounters(!timeline.showsCounters);
    byId("counters").setAttribute("aria-pressed", timeline.showsCounters);
  });
  byId("by-stage").addEventListener("click", () => colorBy(false));
  byId("by-chunk").addEventListener("click", () => colorBy(true));
  byId("path").addEventListener("click", () => select({ path: !timeline.lit.path }));
  byId("fit").addEventListener("click", () => timeline.show(0, model.length));
  drawHeader(model);
  drawLegend(model, select);
  const redrawAll = () => {
    timeline.resize();
    drawPanels(model, timeline, selectAndShow);
  };
  redrawAll();
  wirePointer(timeline, model, select);
  wireKeys(timeline, model, select, document);
  const readView = () => {
    const view = readAddress();
    if (view.to > view.from) timeline.show(view.from, view.to);
    colorBy(view.byChunk);
    select({ chunk: view.chunk, path: view.path });
  };
  readView();
  window.addEventListener("hashchange", readView);
  window.addEventListener("resize", () => timeline.resize());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}

main().catch((error) => {
  document.getElementById("facts").textContent = `This page can not be shown: ${error}. Use a current browser.`;
});
