"use strict";
// The trace as the page holds it: typed columns per track, sorted by start. And how elements are made. Knows no canvas.

// Far enough apart to be told at a glance, light on dark and dark on light; tests/unit/traces judges the distances.
const PALETTE = {
  embed: "#6b3fa0", layer: "#4f74a8", attend: "#3f7fe0", router: "#b48ae8", hot: "#e8572f", cold: "#14a098", combine: "#dba01c",
  head: "#e56bb0", remote: "#8f5a28", hedge: "#c98f6a", exchange: "#2525f4", prefetch: "#7fae2e", copy: "#1fb2d6", load: "#1fb2d6", step: "#a01f4f",
  draft: "#2f6b3c", verify: "#8fc9a0",
};
const CHUNK_COLORS = ["#3f7fe0", "#e8872f", "#14a098", "#b45ad4", "#c9a512", "#d8486b", "#5f9e2f", "#5a6fd6"];
const OTHER_COLOR = "#7a8594";

function stageColor(name) {
  return PALETTE[name] || OTHER_COLOR;
}

// What can be read on a colour "#rrggbb".
function textOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? "#10151a" : "#ffffff";
}

function chunkColor(chunk) {
  return chunk < 0 ? OTHER_COLOR : CHUNK_COLORS[chunk % CHUNK_COLORS.length];
}

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Spans are sorted by start, enclosing ones first; `reach` is the latest end so far, for searching.
function makeTrack(raw) {
  const count = raw.start.length;
  const track = {
    label: raw.label, isWork: raw.work, count, maxDepth: 0, busy: 0,
    start: new Float64Array(count), end: new Float64Array(count), reach: new Float64Array(count),
    name: Uint16Array.from(raw.name), chunk: Int32Array.from(raw.chunk), layer: Int32Array.from(raw.layer),
    more: Int32Array.from(raw.more), depth: new Uint8Array(count), onPath: new Uint8Array(count), instants: raw.instants,
  };
  const open = [];
  let at = 0;
  let reach = 0;
  for (let i = 0; i < count; i++) {
    at += raw.start[i];
    track.start[i] = at;
    track.end[i] = at + raw.duration[i];
    while (open.length && open[open.length - 1] <= at) open.pop();
    track.depth[i] = Math.min(open.length, 3);
    track.maxDepth = Math.max(track.maxDepth, track.depth[i]);
    open.push(track.end[i]);
    track.busy += Math.max(0, track.end[i] - Math.max(at, reach));
    reach = Math.max(reach, track.end[i]);
    track.reach[i] = reach;
  }
  return track;
}

function makeModel(data) {
  const tracks = data.tracks.map(makeTrack);
  const path = new Set(data.report.schedule.critical_path.jobs.map((job) => job.join(" ")));
  for (const track of tracks) {
    for (let i = 0; i < track.count; i++) {
      const layer = track.layer[i] < 0 ? "" : track.layer[i];
      track.onPath[i] = path.has([track.chunk[i], data.names[track.name[i]], layer].join(" ")) ? 1 : 0;
    }
  }
  return {
    tracks, names: data.names, extras: data.extras, report: data.report, experts: data.experts,
    requests: packRows(data.requests), counters: data.counters, length: Math.max(data.length, 1),
  };
}

// Requests that overlap go to rows of their own.
function packRows(requests) {
  const rowEnds = [];
  const spans = requests.map(([name, id, start, end, args]) => {
    let row = rowEnds.findIndex((rowEnd) => rowEnd <= start);
    if (row < 0) row = rowEnds.length;
    rowEnds[row] = end;
    const { request: _, ...facts } = args || {};  // the id again
    return { title: `${name} ${id}`, start, end, facts, row };
  });
  return { spans, rows: rowEnds.length };
}

// The first index whose value is greater than `limit`; `values` rise.
function firstAbove(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The innermost span of a track at a moment, give or take; -1 if there is none.
function spanAt(track, time, slack) {
  let found = -1;
  for (let i = firstAbove(track.reach, time - slack); i < track.count && track.start[i] <= time + slack; i++) {
    if (track.end[i] < time - slack) continue;
    const isExact = track.start[i] <= time && time < track.end[i];
    if (found < 0 || isExact) found = i;
  }
  return found;
}

function formatTime(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return (ns / 1e9).toFixed(size >= 1e10 ? 1 : 2) + " s";
  if (size >= 1e6) return (ns / 1e6).toFixed(size >= 1e8 ? 0 : size >= 1e7 ? 1 : 2) + " ms";
  if (size >= 1e3) return (ns / 1e3).toFixed(size >= 1e5 ? 0 : 1) + " µs";
  return Math.round(ns) + " ns";
}

function formatMoment(ns) {
  return (ns / 1e6).toFixed(4) + " ms";
}

function formatCount(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(0) + "k";
  return String(Math.round(value * 100) / 100);
}

// "1 prompt token", "512 output tokens": a key of arguments is a plural noun.
function formatFact(value, key) {
  const noun = key.replaceAll("_", " ");
  return `${value} ${value === 1 ? noun.replace(/s$/, "") : noun}`;
}

function formatShare(share) {
  return (share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0) + "%";
}
