// Figures and tables below the timeline. They are computed before: nothing is measured here.

function panel(title, children, isWide) {
  return element("article", isWide ? { class: "wide" } : {}, element("h2", {}, title), ...children);
}

function table(heads, rows, className) {
  return element("table", className ? { class: className } : {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows));
}

function row(cells, onclick) {
  const attributes = onclick ? { class: "link", onclick } : {};
  return element("tr", attributes, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell))));
}

function bar(share, color) {
  const style = `width:${Math.min(share, 1) * 100}%` + (color ? `;background:${color}` : "");
  return element("td", { class: "grow" }, element("i", { class: "bar", style }));
}

function efficiencyCell(bound) {
  const share = bound.efficiency;
  const grade = share >= 0.9 ? "good" : share >= 0.6 ? "fair" : "poor";
  return element("td", { class: grade }, formatShare(share));
}

function drawHeader(model) {
  const { metadata, schedule, answers, overlapped_share: overlapped, wall_ns: wall } = model.report;
  const byId = (id) => document.getElementById(id);
  byId("title").textContent = metadata.model || "thermocline timeline";
  document.title = `${metadata.model || "trace"} - thermocline timeline`;
  const spans = model.tracks.reduce((sum, track) => sum + track.count, 0);
  const facts = [metadata.architecture, metadata.machine, metadata.cores && `${metadata.cores} cores`,
    `${spans.toLocaleString("en")} spans`, metadata.thermocline && `thermocline ${metadata.thermocline}`];
  byId("facts").textContent = facts.filter(Boolean).join("  ·  ");
  byId("verdict").textContent = model.report.verdict;
  const of = answers.requests > 1 ? `, median of ${answers.requests}` : "";
  const figures = [[formatTime(wall), "recorded"], [formatShare(overlapped), "of working time in parallel"],
    [formatShare(schedule.total.efficiency), "schedule efficiency"]];
  if (answers.tokens_per_s !== null) figures.unshift([answers.tokens_per_s.toFixed(answers.tokens_per_s < 100 ? 1 : 0), `tokens/s${of}`]);
  if (answers.ttft_ns !== null) figures.unshift([formatTime(answers.ttft_ns), `to the first token${of}`]);
  if (model.report.decode_reads) figures.push([formatShare(model.report.decode_reads.share), "of memory speed in decode"]);
  byId("figures").replaceChildren(...figures.map(([value, name]) => element("li", {}, element("b", {}, value), element("span", {}, name))));
}

function meter(text, share) {
  return element("div", { class: "meter" }, element("span", {}, text),
    element("i", {}, element("b", { style: `width:${Math.min(share, 1) * 100}%` })));
}

function efficiencyPanel(report) {
  const { total, note } = report.schedule;
  const share = (ns) => (total.makespan_ns ? ns / total.makespan_ns : 0);
  const parts = [
    element("p", {}, `No schedule of these jobs could take less than ${formatTime(total.bound_ns)}; this one took ${formatTime(total.makespan_ns)}.`),
    meter(`busiest resource, ${total.busiest ?? "none"}: ${formatTime(total.busiest_ns)} (${formatShare(share(total.busiest_ns))})`, share(total.busiest_ns)),
    meter(`longest chain of jobs: ${formatTime(total.chain_ns)} (${formatShare(share(total.chain_ns))})`, share(total.chain_ns)),
    element("p", { class: "note" }, note),
  ];
  const reads = report.decode_reads;
  parts.push(element("p", { class: "note" }, reads
    ? `Decoding read at least ${(reads.bytes_per_s / 1e9).toFixed(1)} GB/s, ${formatShare(reads.share)} of the ${(reads.limit_bytes_per_s / 1e9).toFixed(1)} GB/s that this machine reads.`
    : "The machine's read speed is not in this trace, so that the jobs themselves can not be judged from it."));
  return panel("How near to the best schedule", parts);
}

function lanesPanel(model) {
  const isWork = new Set(model.tracks.filter((track) => track.isWork).map((track) => track.label));
  const rows = model.report.lanes.map((lane) => row([lane.lane, lane.num_spans.toLocaleString("en"), formatTime(lane.busy_ns),
    formatShare(lane.busy_share), bar(lane.busy_share, isWork.has(lane.lane) ? "" : OTHER_COLOR)]));
  return panel("How busy each lane was", [table(["lane", "spans", "busy", "share", ""], rows)]);
}

function overlapPanel(report) {
  const lanes = report.lanes.map((lane) => lane.lane);
  const together = new Map(report.pairs.flatMap((pair) => [[pair.first + "\n" + pair.second, pair.overlap_ns], [pair.second + "\n" + pair.first, pair.overlap_ns]]));
  const wall = report.wall_ns || 1;
  const rows = report.lanes.map((lane) => element("tr", {}, element("th", { scope: "row" }, lane.lane), ...lanes.map((other) => {
    const ns = other === lane.lane ? lane.busy_ns : together.get(lane.lane + "\n" + other) || 0;
    const alpha = other === lane.lane ? 0.08 : Math.min(0.06 + (ns / wall) * 0.8, 0.85) * (ns > 0);
    return element("td", { style: `background:rgb(var(--heat) / ${alpha.toFixed(3)})`, title: `${lane.lane} and ${other}: ${formatTime(ns)}` }, ns ? formatShare(ns / wall) : "");
  })));
  return panel("How much ran at the same time", [table(["", ...lanes], rows, "matrix"),
    element("p", { class: "note" }, "Share of the whole time in which both worked; on the diagonal, the lane alone.")]);
}

function pathPanel(report) {
  const { stages, length_ns: length } = report.schedule.critical_path;
  const stack = element("div", { class: "stack" }, ...stages.map((stage) =>
    element("i", { style: `width:${(stage.total_ns / (length || 1)) * 100}%;background:${stageColor(stage.name)}`, title: `${stage.name} ${formatTime(stage.total_ns)}` })));
  const rows = stages.map((stage) => row([stage.name, stage.num_jobs, formatTime(stage.total_ns), formatShare(stage.total_ns / (length || 1)),
    bar(stage.total_ns / (length || 1), stageColor(stage.name))]));
  return panel("The longest chain of jobs that wait for each other", [stack, table(["stage", "jobs", "time", "share", ""], rows)]);
}

function layersPanel(report) {
  const layers = report.schedule.layers;
  const highest = Math.max(...layers.map((layer) => layer.makespan_ns), 1);
  const columns = element("div", { class: "columns" }, ...layers.map((layer) => element("i", {
    style: `height:${(layer.makespan_ns / highest) * 100}%`,
    title: `layer ${layer.layer}: ${formatTime(layer.makespan_ns)}, at best ${formatTime(layer.bound_ns)}`,
  }, element("b", { style: `height:${layer.efficiency * 100}%` }))));
  const slowest = [...layers].sort((a, b) => b.makespan_ns - a.makespan_ns).slice(0, 6);
  const rows = slowest.map((layer) => row([`layer ${layer.layer}`, formatTime(layer.makespan_ns), formatTime(layer.bound_ns), efficiencyCell(layer)]));
  return panel("Layers, and the slowest of them", [columns,
    element("p", { class: "note" }, "Time between a chunk's first and last job of the layer, summed over chunks; filled: the least that it could be."),
    table(["", "took", "at best", "efficiency"], rows)]);
}

function chunksPanel(model, timeline, select) {
  const chunks = model.report.schedule.chunks;
  const slowest = [...chunks].sort((a, b) => b.makespan_ns - a.makespan_ns).slice(0, 8).sort((a, b) => a.chunk - b.chunk);
  const rows = slowest.map((chunk) => row([String(chunk.chunk), chunk.kind || "", chunk.tokens ?? "", formatTime(chunk.makespan_ns), formatTime(chunk.bound_ns), efficiencyCell(chunk)],
    () => select(chunk.chunk)));
  const title = chunks.length > slowest.length ? `The ${slowest.length} slowest of ${chunks.length} chunks` : "Chunks";
  return panel(title, [table(["chunk", "kind", "tokens", "took", "at best", "efficiency"], rows)]);
}

function requestsPanel(report) {
  const requests = report.schedule.requests;
  if (!requests.length) return null;
  const slowest = [...requests].sort((a, b) => b.makespan_ns - a.makespan_ns).slice(0, 8).sort((a, b) => a.request - b.request);
  const rows = slowest.map((request) => row([String(request.request), formatTime(request.makespan_ns), formatTime(request.busiest_ns), formatTime(request.chain_ns), efficiencyCell(request)]));
  return panel(requests.length > slowest.length ? `The ${slowest.length} longest of ${requests.length} requests` : "Requests",
    [table(["request", "took", "busiest", "chain", "efficiency"], rows)]);
}

function stagesPanel(report) {
  const total = report.stages.reduce((sum, stage) => sum + stage.total_ns, 0) || 1;
  const rows = report.stages.map((stage) => row([stage.name, stage.num_spans.toLocaleString("en"), formatTime(stage.total_ns), formatTime(stage.total_ns / stage.num_spans),
    bar(stage.total_ns / total, stageColor(stage.name))]));
  return panel("Where the time of all lanes went", [table(["stage", "spans", "time", "mean", ""], rows)]);
}

// One cell per (layer, expert); brightness is the rank of the count, so that one favourite hides nobody.
function expertsPanel(experts) {
  if (!experts || !experts.counts.length || !experts.counts[0].length) return null;
  const { counts, hot } = experts;
  const [layers, width] = [counts.length, counts[0].length];
  const highest = Math.max(...counts.map((line) => Math.max(...line)), 1);
  const canvas = element("canvas", { id: "heat", role: "img", "aria-label": "How often each expert was chosen" });
  const cell = Math.max(4, Math.min(Math.floor(1180 / width), 22));
  const tall = Math.max(6, Math.min(cell, 14));
  canvas.width = width * cell;
  canvas.height = layers * tall;
  const context = canvas.getContext("2d");
  const heat = getComputedStyle(document.documentElement).getPropertyValue("--heat").trim();
  let hotChoices = 0;
  let choices = 0;
  for (let layer = 0; layer < layers; layer++) {
    const isHot = new Set(hot[layer]);
    for (let expert = 0; expert < width; expert++) {
      const count = counts[layer][expert];
      choices += count;
      if (isHot.has(expert)) hotChoices += count;
      const share = Math.sqrt(count / highest);
      context.fillStyle = isHot.has(expert) ? `rgb(232 87 47 / ${0.07 + 0.93 * share})` : `rgb(${heat} / ${0.05 + 0.95 * share})`;
      context.fillRect(expert * cell, layer * tall, cell - 1, tall - 1);
    }
  }
  canvas.style.maxWidth = `${width * 40}px`;
  canvas.title = `${layers} layers by ${width} experts`;
  const words = element("p", { class: "note" }, `${layers} layers (rows) by ${width} experts. The stronger, the more often chosen, at most ${highest.toLocaleString("en")} times. `);
  if (hotChoices) words.append(element("b", { style: "color:#e8572f" }, "Hot experts"), ` got ${formatShare(hotChoices / (choices || 1))} of the choices.`);
  return panel("How often each expert was chosen", [canvas, words], true);
}

function drawPanels(model, timeline, select) {
  const report = model.report;
  const panels = [efficiencyPanel(report), lanesPanel(model), pathPanel(report), overlapPanel(report), layersPanel(report),
    chunksPanel(model, timeline, select), requestsPanel(report), stagesPanel(report), expertsPanel(model.experts)];
  document.getElementById("panels").replaceChildren(...panels.filter(Boolean));
}
