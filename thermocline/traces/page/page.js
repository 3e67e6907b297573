// Wires it up: pointer, keys, buttons, and the part of the address after "#", which names a view.

function showTip(found, model, x, y) {
  const tip = document.getElementById("tip");
  tip.hidden = !found;
  if (!found) return;
  const [title, facts] = describe(found, model);
  const list = element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  tip.replaceChildren(element("b", {}, title), list);
  const left = Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8);
  const top = Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8);
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = Math.max(top, 4) + "px";
}

function describe(found, model) {
  if (found.kind === "request") {
    const { name, id, start, end, args } = found.span;
    return [`${name} ${id}`, [["lasted", formatTime(end - start)], ["at", formatMoment(start)], ...Object.entries(args || {})]];
  }
  if (found.kind === "counter") {
    const { name, times, values } = found.counter;
    const at = firstAbove(times, found.time) - 1;
    return [name, [["value", at < 0 ? "none yet" : values[at].toLocaleString("en")], ["at", formatMoment(found.time)]]];
  }
  if (found.kind === "instant") {
    const [at, name, more] = found.instant;
    return [`${model.names[name]}`, [["at", formatMoment(at)], ...Object.entries(model.extras[more])]];
  }
  const { track, index } = found;
  const facts = [["took", formatTime(track.end[index] - track.start[index])], ["at", formatTime(track.start[index])], ["lane", track.label]];
  if (track.chunk[index] >= 0) facts.push(["chunk", track.chunk[index]]);
  if (track.layer[index] >= 0) facts.push(["layer", track.layer[index]]);
  facts.push(...Object.entries(model.extras[track.more[index]]));
  if (track.onPath[index]) facts.push(["longest chain", "yes"]);
  return [model.names[track.name[index]], facts];
}

function wirePointer(timeline, model, select) {
  const canvas = timeline.canvas;
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / timeline.unit, (event.clientY - box.top) / timeline.unit];
  };
  const toOverview = (x) => {
    const half = (timeline.to - timeline.from) / 2;
    const at = ((x - GUTTER) / timeline.plotWidth) * model.length;
    timeline.show(at - half, at + half);
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (isSideways) timeline.pan(event.deltaX || event.deltaY);
    else timeline.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), place(event)[0]);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    drag = { x, moved: 0, isOverview: y < OVERVIEW };
    canvas.setPointerCapture(event.pointerId);
    if (drag.isOverview) toOverview(x);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (drag) {
      drag.moved += Math.abs(x - drag.x);
      if (drag.isOverview) toOverview(x);
      else if (drag.moved > 3) timeline.pan(drag.x - x);
      canvas.classList.toggle("dragging", drag.moved > 3);
      drag.x = x;
      showTip(null);
      return;
    }
    timeline.hover = timeline.find(x, y);
    showTip(timeline.hover, model, event.clientX, event.clientY);
    timeline.redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && drag.moved <= 3 && !drag.isOverview) {
      const found = timeline.find(...place(event));
      const chunk = found && found.kind === "span" ? found.track.chunk[found.index] : -1;
      select({ chunk: chunk === timeline.lit.chunk ? -1 : chunk });
    }
    drag = null;
    canvas.classList.remove("dragging");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => {
    timeline.hover = null;
    showTip(null);
    timeline.redraw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const found = timeline.find(...place(event));
    if (!found || found.kind !== "span") return;
    const [start, end] = [found.track.start[found.index], found.track.end[found.index]];
    timeline.show(start - (end - start), end + (end - start));
  });
}

function wireKeys(timeline, model, select) {
  const actions = {
    w: () => timeline.zoom(0.75), s: () => timeline.zoom(1 / 0.75), a: () => timeline.pan(-90), d: () => timeline.pan(90),
    ArrowUp: () => timeline.zoom(0.75), ArrowDown: () => timeline.zoom(1 / 0.75), ArrowLeft: () => timeline.pan(-90), ArrowRight: () => timeline.pan(90),
    0: () => timeline.show(0, model.length), p: () => select({ path: !timeline.lit.path }), Escape: () => select({}),
  };
  document.addEventListener("keydown", (event) => {
    // Arrows scroll the page unless the timeline has the focus.
    const isOurs = !event.key.startsWith("Arrow") || document.activeElement === timeline.canvas;
    if (event.ctrlKey || event.metaKey || event.altKey || !isOurs || !Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  });
}

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
  wireKeys(timeline, model, select);
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
