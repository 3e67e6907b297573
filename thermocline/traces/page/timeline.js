// The canvas: lanes, counters and requests over time, and where on it something is.

const GUTTER = 128;
const OVERVIEW = 34;
const RULER = 22;
const PAD = 5;

class Timeline {
  constructor(model, canvas) {
    this.model = model;
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.from = 0;
    this.to = model.length;
    this.byChunk = false;
    this.showsCounters = false;
    this.lit = { chunk: -1, name: -1, path: false };
    this.hover = null;
    this.pending = false;
    this.layout();
    this.resize();
  }

  setCounters(isShown) {
    this.showsCounters = isShown;
    this.layout();
    this.resize();
  }

  // Rows from top to bottom: requests, tracks, counters.
  layout() {
    const rows = [];
    let y = OVERVIEW + RULER;
    const add = (kind, height, what) => {
      rows.push({ kind, y, height, ...what });
      y += height + PAD;
    };
    y += PAD;
    for (const track of this.model.tracks) {
      const isRequests = track.label === "requests" && this.model.requests.rows > 0;
      if (isRequests) add("requests", Math.min(this.model.requests.rows, 12) * 15, { track });
      else if (track.count || track.instants.length) add("track", (track.isWork ? 34 : 16) + track.maxDepth * 8, { track });
    }
    const counters = this.showsCounters ? this.model.counters.filter((counter) => counter.max > 0) : [];
    for (const counter of counters) add("counter", counter.name.startsWith("channel ") ? 13 : 26, { counter });
    this.rows = rows;
    this.height = y + 2;
  }

  resize() {
    // On a wide screen everything is drawn larger: one unit is more than one pixel of the page.
    this.unit = this.canvas.clientWidth > 1900 ? 1.3 : 1;
    const scale = (window.devicePixelRatio || 1) * this.unit;
    this.width = this.canvas.clientWidth / this.unit;
    this.canvas.style.height = this.height * this.unit + "px";
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(document.documentElement);
    this.theme = {};
    for (const name of ["bg", "panel", "line", "text", "dim", "accent", "row"]) {
      this.theme[name] = style.getPropertyValue("--" + name).trim();
    }
    this.overview = this.measureOverview();
    this.redraw();
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  get plotWidth() { return Math.max(this.width - GUTTER - 8, 10); }
  x(time) { return GUTTER + ((time - this.from) / (this.to - this.from)) * this.plotWidth; }
  time(x) { return this.from + ((x - GUTTER) / this.plotWidth) * (this.to - this.from); }

  show(from, to) {
    const length = this.model.length;
    const span = Math.min(Math.max(to - from, 50), length * 1.04);
    const margin = length * 0.02;
    this.from = Math.min(Math.max(from, -margin), length + margin - span);
    this.to = this.from + span;
    this.redraw();
    this.onShow?.();
  }

  zoom(factor, x) {
    const at = this.time(x ?? GUTTER + this.plotWidth / 2);
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(pixels) {
    const shift = (pixels / this.plotWidth) * (this.to - this.from);
    this.show(this.from + shift, this.to + shift);
  }

  isLit(track, i) {
    const lit = this.lit;
    if (lit.chunk >= 0) return track.chunk[i] === lit.chunk;
    if (lit.name >= 0) return track.name[i] === lit.name;
    return !lit.path || track.onPath[i] === 1;
  }

  get isFiltered() { return this.lit.chunk >= 0 || this.lit.name >= 0 || this.lit.path; }

  draw() {
    const context = this.context;
    context.globalAlpha = 1;
    context.fillStyle = this.theme.bg;
    context.fillRect(0, 0, this.width, this.height);
    this.font(11);
    this.drawOverview();
    this.drawRuler();
    for (const row of this.rows) {
      context.save();
      context.beginPath();
      context.rect(GUTTER, row.y, this.plotWidth, row.height);
      context.fillStyle = this.theme.row;
      context.fill();
      context.clip();
      let note = "";
      if (row.kind === "track") note = this.drawTrack(row);
      else if (row.kind === "counter") note = this.drawCounter(row);
      else this.drawRequests(row);
      context.restore();
      this.drawLabel(row, note);
    }
    if (this.lit.chunk >= 0) this.drawFlow();
  }

  font(size, weight) {
    this.context.font = `${weight || 400} ${size}px system-ui, "Segoe UI", Arial, sans-serif`;
  }

  drawLabel(row, note) {
    const context = this.context;
    const label = row.kind === "counter" ? row.counter.name : row.track.label;
    context.globalAlpha = 1;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const middle = row.y + row.height / 2;
    const isTall = row.height >= 26 && note;
    this.font(row.kind === "counter" ? 10 : 12, row.kind === "track" && row.track.isWork ? 600 : 400);
    context.fillStyle = row.kind === "track" && row.track.isWork ? this.theme.text : this.theme.dim;
    context.fillText(label, 8, isTall ? middle - 7 : middle, GUTTER - (isTall ? 14 : 50));
    if (!note) return;
    this.font(10);
    context.fillStyle = this.theme.dim;
    context.textAlign = isTall ? "left" : "right";
    context.fillText(note, isTall ? 8 : GUTTER - 8, isTall ? middle + 8 : middle);
  }

  drawRuler() {
    const context = this.context;
    const step = roundStep((this.to - this.from) / Math.max(this.plotWidth / 110, 2));
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.font(11);
    const top = OVERVIEW;
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      context.fillStyle = this.theme.line;
      context.fillRect(x - 0.5, top + RULER - 4, 1, this.height - top - RULER);
      context.fillStyle = this.theme.dim;
      const label = rulerLabel(at, step);
      const half = context.measureText(label).width / 2;
      context.fillText(label, Math.min(x, this.width - half - 4), top + RULER / 2);
    }
  }

  measureOverview() {
    const columns = Math.max(Math.floor(this.plotWidth), 10);
    const work = this.model.tracks.filter((track) => track.isWork && track.count);
    const busy = new Float64Array(columns);
    const scale = columns / this.model.length;
    for (const track of work) {
      let reach = 0;
      for (let i = 0; i < track.count; i++) {
        const start = Math.max(track.start[i], reach) * scale;
        const end = track.end[i] * scale;
        reach = track.reach[i];
        for (let column = Math.floor(start); column < end && column < columns; column++) {
          busy[column] += Math.min(end, column + 1) - Math.max(start, column);
        }
      }
    }
    return busy.map((value) => value / Math.max(work.length, 1));
  }

  drawOverview() {
    const context = this.context;
    const height = OVERVIEW - 8;
    const bottom = OVERVIEW - 3;
    context.fillStyle = this.theme.row;
    context.fillRect(GUTTER, bottom - height, this.plotWidth, height);
    context.fillStyle = this.theme.dim;
    context.globalAlpha = 0.6;
    context.beginPath();
    this.overview.forEach((value, column) => context.rect(GUTTER + column, bottom - value * height, 1, value * height));
    context.fill();
    const left = GUTTER + (Math.max(this.from, 0) / this.model.length) * this.plotWidth;
    const right = GUTTER + (Math.min(this.to, this.model.length) / this.model.length) * this.plotWidth;
    context.globalAlpha = 0.16;
    context.fillStyle = this.theme.accent;
    context.fillRect(left, bottom - height, right - left, height);
    context.globalAlpha = 1;
    context.strokeStyle = this.theme.accent;
    context.strokeRect(left + 0.5, bottom - height + 0.5, Math.max(right - left - 1, 1), height - 1);
    context.fillStyle = this.theme.dim;
    this.font(10);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText("resources busy", 8, bottom - height / 2);
  }

  color(track, i) {
    return this.byChunk ? chunkColor(track.chunk[i]) : stageColor(this.model.names[track.name[i]]);
  }

  // Wide spans one by one; of narrow ones, per pixel and colour, the share of the pixel that they fill.
  drawTrack(row) {
    const { track, height } = row;
    const scale = this.plotWidth / (this.to - this.from);
    const columns = new Columns(this, row);
    let reach = this.from;
    let busy = 0;
    for (let i = firstAbove(track.reach, this.from); i < track.count && track.start[i] < this.to; i++) {
      const start = track.start[i];
      const end = track.end[i];
      if (end <= this.from) continue;
      if (end > reach) {
        busy += Math.min(end, this.to) - Math.max(start, reach);
        reach = end;
      }
      const left = GUTTER + (start - this.from) * scale;
      const right = GUTTER + (end - this.from) * scale;
      const isLit = !this.isFiltered || this.isLit(track, i);
      if (right - left >= 1) this.drawSpan(row, i, left, right, isLit);
      else if (!track.depth[i]) columns.add(this.byChunk ? track.chunk[i] : track.name[i], isLit, left, right);
    }
    columns.finish();
    this.drawInstants(row);
    const visible = Math.min(this.to, this.model.length) - Math.max(this.from, 0);
    return track.count ? formatShare(visible > 0 ? busy / visible : 0) + (height >= 30 ? " busy" : "") : "";
  }

  drawSpan(row, i, left, right, isLit) {
    const { track, y, height } = row;
    const context = this.context;
    const inset = track.depth[i] * 8;
    const visibleLeft = Math.max(left, GUTTER - 2);
    const visibleRight = Math.min(right, GUTTER + this.plotWidth + 2);
    const width = Math.max(visibleRight - visibleLeft - (right - left > 4 ? 0.75 : 0), 0.8);
    context.globalAlpha = isLit ? 1 : 0.16;
    context.fillStyle = this.color(track, i);
    context.fillRect(visibleLeft, y + inset, width, height - inset);
    if (right - left > 5 && !this.byChunk && track.chunk[i] >= 0 && height >= 30) {
      context.fillStyle = chunkColor(track.chunk[i]);
      context.fillRect(visibleLeft, y + height - 4, width, 4);
      context.fillStyle = this.theme.bg;
      context.fillRect(visibleLeft, y + height - 5, width, 1);
    }
    if (this.hover && this.hover.track === track && this.hover.index === i) {
      context.strokeStyle = this.theme.text;
      context.lineWidth = 1.5;
      context.strokeRect(visibleLeft + 0.75, y + inset + 0.75, Math.max(width - 1.5, 1), height - inset - 1.5);
    }
    if (width > 26 && isLit && height >= 15) this.drawSpanText(track, i, visibleLeft, width, y + inset, height - inset);
    context.globalAlpha = 1;
  }

  drawSpanText(track, i, left, width, y, height) {
    const context = this.context;
    const layer = track.layer[i] < 0 ? "" : track.layer[i];
    const name = this.model.names[track.name[i]];
    this.font(10.5, 500);
    const texts = layer === "" ? [name] : [`${name} ${layer}`, String(layer)];
    const text = texts.find((candidate) => context.measureText(candidate).width < width - 6);
    if (text === undefined) return;
    context.fillStyle = textOn(this.color(track, i));
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, left + width / 2, y + (height >= 26 ? (height - 4) / 2 : height / 2));
  }

  drawInstants(row) {
    const context = this.context;
    let last = -10;
    for (const [at] of row.track.instants) {
      const x = this.x(at);
      if (x < GUTTER - 4 || x > GUTTER + this.plotWidth + 4 || x - last < 1) continue;
      last = x;
      const middle = row.y + row.height / 2;
      context.fillStyle = this.theme.dim;
      context.beginPath();
      context.moveTo(x, middle - 4);
      context.lineTo(x + 3.5, middle);
      context.lineTo(x, middle + 4);
      context.lineTo(x - 3.5, middle);
      context.fill();
    }
  }

  drawRequests(row) {
    const context = this.context;
    const height = row.height / Math.min(this.model.requests.rows, 12);
    // First tokens: lines, as the requests' texts are read across them.
    context.fillStyle = this.theme.text;
    context.globalAlpha = 0.55;
    for (const [at] of row.track.instants) context.fillRect(this.x(at) - 0.75, row.y, 1.5, row.height);
    context.globalAlpha = 1;
    for (const span of this.model.requests.spans) {
      const left = Math.max(this.x(span.start), GUTTER - 2);
      const right = Math.min(this.x(span.end), GUTTER + this.plotWidth + 2);
      if (right < left || span.row >= 12) continue;
      const y = row.y + span.row * height;
      context.fillStyle = this.theme.accent;
      context.globalAlpha = 0.22;
      context.fillRect(left, y + 1, Math.max(right - left, 1), height - 2);
      context.globalAlpha = 1;
      context.fillRect(left, y + 1, 2, height - 2);
      if (right - left < 60) continue;
      this.font(10);
      context.fillStyle = this.theme.text;
      context.textAlign = "left";
      context.textBaseline = "middle";
      const facts = Object.entries(span.facts).map(([key, value]) => formatFact(value, key));
      context.fillText([span.title, ...facts].join(", "), left + 6, y + height / 2 + 0.5, right - left - 8);
    }
  }

  // Values that share a pixel are drawn as their mean over time, with the highest behind it.
  drawCounter(row) {
    const { times, values, max } = row.counter;
    const context = this.context;
    const scale = (row.height - 3) / (max || 1);
    const bottom = row.y + row.height;
    const edge = GUTTER + this.plotWidth;
    context.fillStyle = this.theme.dim;
    const fill = (left, width, value, alpha) => {
      context.globalAlpha = alpha;
      if (value > 0) context.fillRect(left, bottom - value * scale, width, value * scale);
    };
    let [pixel, area, high] = [-1, 0, 0];
    const flush = () => {
      fill(pixel, 1, high, 0.22);
      fill(pixel, 1, area, 0.5);
      [area, high] = [0, 0];
    };
    for (let i = Math.max(firstAbove(times, this.from) - 1, 0); i < times.length && times[i] < this.to; i++) {
      const left = Math.max(this.x(times[i]), GUTTER);
      const right = i + 1 < times.length ? Math.min(this.x(times[i + 1]), edge) : edge;
      if (right - left >= 1) {
        fill(left, right - left, values[i], 0.6);
        continue;
      }
      if (Math.floor(left) !== pixel) {
        flush();
        pixel = Math.floor(left);
      }
      area += values[i] * (right - left);
      high = Math.max(high, values[i]);
    }
    flush();
    context.globalAlpha = 1;
    return "≤ " + formatCount(max);
  }

  // The jobs of the chunk in view, by start: where each began first and ended last.
  jobsOfChunk() {
    const jobs = new Map();
    for (const row of this.rows) {
      if (row.kind !== "track" || !row.track.isWork) continue;
      const track = row.track;
      const y = row.y + row.height / 2;
      for (let i = firstAbove(track.reach, this.from); i < track.count && track.start[i] < this.to; i++) {
        if (track.chunk[i] !== this.lit.chunk) continue;
        const key = track.name[i] + " " + track.layer[i];
        const job = jobs.get(key) || { start: Infinity, end: -Infinity };
        if (track.start[i] < job.start) Object.assign(job, { start: track.start[i], startY: y });
        if (track.end[i] > job.end) Object.assign(job, { end: track.end[i], endY: y });
        jobs.set(key, job);
      }
    }
    return [...jobs.values()].sort((a, b) => a.start - b.start);
  }

  // An arrow to each job of the chunk from the one that ended last before it.
  drawFlow() {
    const context = this.context;
    const jobs = this.jobsOfChunk();
    context.save();
    context.beginPath();
    context.rect(GUTTER, OVERVIEW + RULER, this.plotWidth, this.height);
    context.clip();
    context.strokeStyle = context.fillStyle = this.theme.text;
    context.lineWidth = 1.2;
    for (let i = 1; i < jobs.length; i++) {
      const job = jobs[i];
      const ended = jobs.slice(Math.max(i - 6, 0), i).filter((other) => other.end <= job.start);
      if (!ended.length) continue;
      const before = ended.reduce((a, b) => (b.end > a.end ? b : a));
      this.drawArrow(this.x(before.end), before.endY, this.x(job.start), job.startY);
    }
    context.restore();
  }

  drawArrow(fromX, fromY, toX, toY) {
    const context = this.context;
    const bend = Math.min(Math.max((toX - fromX) / 2, 7), 40);
    context.globalAlpha = 0.8;
    context.beginPath();
    context.moveTo(fromX, fromY);
    context.bezierCurveTo(fromX + bend, fromY, toX - bend, toY, toX, toY);
    context.stroke();
    context.beginPath();
    context.moveTo(toX + 4, toY);
    context.lineTo(toX - 3, toY - 3);
    context.lineTo(toX - 3, toY + 3);
    context.fill();
    context.globalAlpha = 1;
  }

  // What lies under a point: a span, an instant, a request, or null.
  find(x, y) {
    const row = this.rows.find((candidate) => y >= candidate.y && y < candidate.y + candidate.height);
    if (!row || x < GUTTER) return null;
    const time = this.time(x);
    const slack = (1.5 / this.plotWidth) * (this.to - this.from);
    if (row.kind === "requests") {
      const line = Math.floor(((y - row.y) / row.height) * Math.min(this.model.requests.rows, 12));
      const span = this.model.requests.spans.find((s) => s.row === line && s.start <= time && time < s.end);
      if (span) return { kind: "request", span };
    }
    if (row.kind === "counter") return { kind: "counter", counter: row.counter, time };
    const instant = row.track.instants.find(([at]) => Math.abs(at - time) <= slack * 2.5);
    const index = spanAt(row.track, time, slack);
    if (index < 0 && instant) return { kind: "instant", instant, track: row.track };
    return index < 0 ? null : { kind: "span", track: row.track, index };
  }
}

// Spans narrower than a pixel, gathered per pixel: they reach into the next one at most.
class Columns {
  constructor(timeline, row) {
    this.timeline = timeline;
    this.row = row;
    this.at = -1;
    this.now = new Map();
    this.next = new Map();
  }

  add(kind, isLit, left, right) {
    const at = Math.floor(left);
    if (at !== this.at) this.moveTo(at);
    const slot = kind * 2 + (isLit ? 1 : 0);
    const split = Math.min(right, at + 1);
    this.now.set(slot, (this.now.get(slot) || 0) + split - left);
    if (right > split) this.next.set(slot, (this.next.get(slot) || 0) + right - split);
  }

  moveTo(at) {
    this.flush(this.now, this.at);
    [this.now, this.next] = [this.next, this.now];
    if (at === this.at + 1) {
      this.at = at;
      return;
    }
    this.flush(this.now, this.at + 1);
    this.at = at;
  }

  finish() {
    this.flush(this.now, this.at);
    this.flush(this.next, this.at + 1);
  }

  flush(shares, x) {
    if (!shares.size) return;
    const { y, height } = this.row;
    const context = this.timeline.context;
    let bottom = y + height;
    const slots = shares.size > 1 ? [...shares.keys()].sort((a, b) => a - b) : shares.keys();
    for (const slot of slots) {
      const part = Math.max(shares.get(slot) * height, 0.5);
      const kind = slot >> 1;
      context.globalAlpha = slot & 1 ? 1 : 0.18;
      context.fillStyle = this.timeline.byChunk ? chunkColor(kind) : stageColor(this.timeline.model.names[kind]);
      context.fillRect(x, bottom - part, 1, part);
      bottom -= part;
    }
    context.globalAlpha = 1;
    shares.clear();
  }
}

function roundStep(raw) {
  const decade = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((factor) => factor * decade >= raw) * decade;
}

function rulerLabel(at, step) {
  if (step >= 1e9) return (at / 1e9).toFixed(0) + " s";
  if (step >= 1e6) return (at / 1e6).toFixed(0) + " ms";
  if (step >= 1e3) return (at / 1e6).toFixed(6 - Math.floor(Math.log10(step))) + " ms";
  return (at / 1e3).toFixed(3 - Math.floor(Math.log10(Math.max(step, 1)))) + " µs";
}
