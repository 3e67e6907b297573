"use strict";
// Markdown to elements. What a model writes becomes text nodes alone: no markup is ever made of its text, pictures are
// shown as links, and links lead to web pages and mail only.

const MAX_NESTING = 8;
// Emphasis and links are looked for so many characters ahead, so that no text takes the square of its length.
const MAX_SPAN = 1000;
const MAX_LINK = 2000;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SPAN = `([^]{1,${MAX_SPAN}}?)`;
// Sticky: each is tried where its first character stands.
const INLINE = [
  ["***", new RegExp(`\\*\\*\\*(?=[^\\s*])${SPAN}(?<=[^\\s*\\\\])\\*\\*\\*(?!\\*)`, "y"), ["em", "strong"]],
  ["**", new RegExp(`\\*\\*(?=[^\\s*])${SPAN}(?<=[^\\s\\\\])\\*\\*(?!\\*)`, "y"), ["strong"]],
  ["*", new RegExp(`\\*(?=[^\\s*])((?:[^*]|\\*\\*){1,${MAX_SPAN}}?)(?<=[^\\s*\\\\])\\*(?!\\*)`, "y"), ["em"]],
  ["__", new RegExp(`__(?=[^\\s_])${SPAN}(?<=[^\\s_\\\\])__(?![\\p{L}\\p{N}_])`, "yu"), ["strong"]],
  ["_", new RegExp(`_(?=[^\\s_])([^_]{1,${MAX_SPAN}}?)(?<=[^\\s_\\\\])_(?![\\p{L}\\p{N}_])`, "yu"), ["em"]],
  ["~~", new RegExp(`~~(?=[^\\s~])${SPAN}(?<=[^\\s~\\\\])~~(?!~)`, "y"), ["del"]],
];
const CODE_SPAN = new RegExp(`(\`+)(?!\`)([^]{1,${MAX_SPAN}}?)(?<!\`)\\1(?!\`)`, "y");
const LINK = new RegExp(`!?\\[([^\\[\\]]{0,${MAX_SPAN}})\\]\\(<?([^\\s()<>]{1,${MAX_LINK}}(?:\\([^\\s()<>]{0,200}\\)[^\\s()<>]{0,200})?)>?(?:[ \\t]+["'(][^"')]{0,300}["')])?\\)`, "y");
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const SPECIAL = /[\\`*_~![h]/g;

// The address of a link, null for one that is not to be followed.
function safeAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function linkTo(address, children) {
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

// The nodes of a text within a block.
function inlineNodes(text, depth = 0) {
  const nodes = [];
  let done = 0;
  let at = 0;
  const take = (end, ...made) => {
    if (at > done) nodes.push(text.slice(done, at));
    nodes.push(...made);
    done = at = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    at = found.index;
    const end = depth > MAX_NESTING ? null : inlineAt(text, at, depth, take);
    if (end === null) at = Math.max(runEnd(text, at), done);
  }
  at = text.length;
  if (at > done) nodes.push(text.slice(done));
  return nodes;
}

function runEnd(text, at) {
  const char = text[at];
  let end = at + 1;
  while ("*_~`".includes(char) && text[end] === char) end += 1;
  return end;
}

// Takes what begins at a special character; null if that is only a character.
function inlineAt(text, at, depth, take) {
  const char = text[at];
  if (char === "\\") {
    if (!/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return null;
    return take(at + 2, text[at + 1]) ?? true;
  }
  if (char === "`") {
    const code = matchAt(CODE_SPAN, text, at);
    if (!code) return null;
    const inner = code[2].replace(/\n/g, " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
    return take(at + code[0].length, element("code", {}, isPadded ? inner.slice(1, -1) : inner)) ?? true;
  }
  if (char === "!" || char === "[") {
    const link = matchAt(LINK, text, at);
    const address = link && safeAddress(link[2]);
    if (!address) return null;
    return take(at + link[0].length, linkTo(address, inlineNodes(link[1] || link[2], depth + 1))) ?? true;
  }
  if (char === "h") {
    const found = /[\p{L}\p{N}]/u.test(text[at - 1] ?? "") ? null : matchAt(ADDRESS, text, at);
    const shown = found && found[0].replace(/[.,;:!?)\]*_~]+$/, "");
    const address = shown && safeAddress(shown);
    if (!address) return null;
    return take(at + shown.length, linkTo(address, [shown])) ?? true;
  }
  if (char === "_" && /[\p{L}\p{N}_]/u.test(text[at - 1] ?? "")) return null;
  for (const [mark, pattern, tags] of INLINE) {
    if (!text.startsWith(mark, at)) continue;
    const found = matchAt(pattern, text, at);
    if (!found) continue;
    const inside = inlineNodes(found[1], depth + 1);
    return take(at + found[0].length, tags.reduceRight((inner, tag) => [element(tag, {}, ...inner)], inside)[0]) ?? true;
  }
  return null;
}

// The elements of a text: one per block.
function markdownNodes(text) {
  return blockNodes(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blockNodes(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [node, next] = blockAt(lines, at, depth);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

// The block that begins at a line, and the line behind it.
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  if (/^ {4}/.test(line)) return indented(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [element(`h${Math.min(heading[1].length + 3, 6)}`, { class: `level-${heading[1].length}` }, ...inlineNodes(heading[2] ?? "")), at + 1];
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (depth < MAX_NESTING) {
    if (QUOTE.test(line)) return quoted(lines, at, depth);
    if (ITEM.test(line)) return listed(lines, at, depth);
  }
  if (isTable(lines, at)) return tabled(lines, at);
  let end = at + 1;
  while (end < lines.length && !interrupts(lines, end)) end += 1;
  return [element("p", {}, ...inlineNodes(lines.slice(at, end).map((each) => each.trim()).join("\n"))), end];
}

// Whether a paragraph ends before this line.
function interrupts(lines, at) {
  const line = lines[at];
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return Boolean(item && item[4] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1)) || isTable(lines, at);
}

function fenced(lines, at, [, fence, info]) {
  const indent = lines[at].search(/\S/);
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, Math.max(line.search(/\S|$/), 0)))).join("\n");
  return [codeBlock(text, info.trim().split(/\s+/)[0]), Math.min(end + 1, lines.length)];
}

function indented(lines, at) {
  let end = at;
  while (end < lines.length && (/^ {4}/.test(lines[end]) || !lines[end].trim())) end += 1;
  while (!lines[end - 1].trim()) end -= 1;
  return [codeBlock(lines.slice(at, end).map((line) => line.slice(4)).join("\n"), ""), end];
}

function codeBlock(text, language) {
  const head = element("div", { class: "code-head" }, element("span", {}, language || "code"), copyButton(() => text));
  return element("div", { class: "code" }, head, element("pre", {}, element("code", {}, text)));
}

function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [element("blockquote", {}, ...blockNodes(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1)), end];
}

function listed(lines, at, depth) {
  const [, , mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || RULE.test(lines[end]) || item[2].slice(-1) !== mark.slice(-1)) break;
    const offset = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
    const own = [item[4]];
    end += 1;
    while (end < lines.length && belongs(lines, end, offset, own)) {
      own.push(lines[end].slice(Math.min(offset, lines[end].search(/\S|$/))));
      end += 1;
    }
    items.push(element("li", {}, ...tight(blockNodes(own, depth + 1))));
    // Blank lines between two items.
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    if (next < lines.length && ITEM.test(lines[next])) end = next;
  }
  const start = parseInt(mark, 10);
  return [element(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start } : {}, ...items), end];
}

// Whether a line is a part of the list item whose content begins at column `offset`.
function belongs(lines, at, offset, own) {
  const line = lines[at];
  const indent = line.search(/\S/);
  if (indent < 0) {
    let next = at;
    while (next < lines.length && !lines[next].trim()) next += 1;
    return next < lines.length && lines[next].search(/\S/) >= offset;
  }
  if (indent >= offset) return true;
  return Boolean(own[own.length - 1].trim()) && !ITEM.test(line) && !interrupts(lines, at);
}

// A list item that is a single paragraph is shown without its margins.
function tight(nodes) {
  return nodes.flatMap((node, index) => (node.tagName === "P" && (index === 0 || nodes.length === 1) ? [...node.childNodes] : [node]));
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return lines[at].includes("|") && rule !== undefined && rule.includes("-") && TABLE_RULE.test(rule)
    && cellsOf(lines[at]).length === cellsOf(rule).length;
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function tabled(lines, at) {
  const heads = cellsOf(lines[at]);
  const sides = cellsOf(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "middle" : "right") : "left"));
  const row = (tag, cells) => element("tr", {}, ...heads.map((_, index) => element(tag, { class: sides[index] }, ...inlineNodes(cells[index] ?? ""))));
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row("td", cellsOf(line)));
  const table = element("table", {}, element("thead", {}, row("th", heads)), element("tbody", {}, ...body));
  return [element("div", { class: "table" }, table), end];
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Pages of other machines without TLS have no clipboard of their own.
  const area = element("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error("the browser does not copy");
}

function copyButton(getText) {
  const button = element("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    const isDone = await copyText(getText()).then(() => true, () => false);
    button.textContent = isDone ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// An answer as it grows: blocks that have ended stay, the last one is made again with each frame.
class MarkdownView {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.settled = 0;
    this.numSettled = 0;
    this.isDue = false;
    this.nextAt = 0;
    this.beforeChange = (change) => change();
  }

  push(text) {
    this.text += text;
    if (this.isDue) return;
    this.isDue = true;
    const draw = () => {
      if (performance.now() < this.nextAt) {
        requestAnimationFrame(draw);
        return;
      }
      this.isDue = false;
      this.draw();
    };
    requestAnimationFrame(draw);
  }

  draw() {
    const start = performance.now();
    this.beforeChange(() => {
      const end = this.settledEnd();
      const add = (text) => this.node.append(...markdownNodes(text));
      while (this.node.childNodes.length > this.numSettled) this.node.lastChild.remove();
      if (end > this.settled) {
        add(this.text.slice(this.settled, end));
        this.settled = end;
        this.numSettled = this.node.childNodes.length;
      }
      add(this.text.slice(this.settled));
    });
    // A block that takes long to make is made less often.
    this.nextAt = performance.now() + 8 * (performance.now() - start);
  }

  // Behind the last blank line that is outside of code.
  settledEnd() {
    let at = this.settled;
    let end = at;
    let fence = null;
    for (const line of this.text.slice(at).split("\n")) {
      const found = FENCE.exec(line);
      if (found && fence === null) fence = found[1];
      else if (found && found[1].startsWith(fence) && !found[2].trim()) fence = null;
      at += line.length + 1;
      if (fence === null && !line.trim() && at <= this.text.length) end = at;
    }
    return end;
  }

  // The whole text once more: only now are lists known whole.
  finish() {
    this.isDue = true;
    this.beforeChange(() => this.node.replaceChildren(...markdownNodes(this.text)));
  }
}
