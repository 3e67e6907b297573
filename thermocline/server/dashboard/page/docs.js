"use strict";
// The HTTP interface, as /openapi.json of this server describes it.

const EXAMPLE_DEPTH = 3;

const nameOf = (ref) => ref.split("/").pop();

// A type in words, with links to those that have a name.
function typeNodes(schema) {
  if (schema === undefined || schema === true || !Object.keys(schema).length) return ["anything"];
  if (schema.$ref) return [element("a", { href: `#${nameOf(schema.$ref)}` }, nameOf(schema.$ref))];
  if (schema.anyOf) {
    // A field that may be null may be left out.
    const kinds = schema.anyOf.filter((each) => each.type !== "null");
    return kinds.flatMap((each, index) => [...(index ? [" or "] : []), ...typeNodes(each)]);
  }
  if (schema.enum) return [schema.enum.map((each) => JSON.stringify(each)).join(" | ")];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.type === "array") {
    const isOneOf = (schema.items?.anyOf?.length ?? 0) > 1;
    return schema.items ? ["list of ", isOneOf ? "(" : "", ...typeNodes(schema.items), isOneOf ? ")" : ""] : ["list"];
  }
  if (schema.type === undefined) return ["anything"];
  if (schema.type === "object" && typeof schema.additionalProperties === "object") return ["object of ", ...typeNodes(schema.additionalProperties)];
  const words = { integer: "whole number", boolean: "true or false", string: "text" };
  return [(words[schema.type] ?? schema.type) + limits(schema)];
}

function limits(schema) {
  const { minimum: low, maximum: high, exclusiveMinimum: above, minLength: least, maxLength: most } = schema;
  const parts = [];
  if (above !== undefined) parts.push(`above ${above}`);
  if (low !== undefined && high !== undefined) parts.push(`${low} to ${high}`);
  else if (low !== undefined) parts.push(`from ${low}`);
  else if (high !== undefined) parts.push(`up to ${high}`);
  if (least !== undefined) parts.push(`at least ${least} characters`);
  if (most !== undefined) parts.push(`at most ${most} characters`);
  return parts.length ? `, ${parts.join(", ")}` : "";
}

function defaultText(schema, isNeeded) {
  if (isNeeded) return element("span", { class: "needed" }, "required");
  if (schema.default === undefined || schema.default === null) return "";
  return JSON.stringify(schema.default);
}

function fieldsTable(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => element("tr", {},
    element("td", {}, element("code", {}, name)), element("td", {}, ...typeNodes(field)),
    element("td", {}, defaultText(field, schema.required?.includes(name)))));
  if (!rows.length) return element("p", { class: "note" }, ...typeNodes(schema));
  const head = element("tr", {}, ...["field", "type", "default"].map((each) => element("th", { scope: "col" }, each)));
  return element("div", { class: "fields" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

// A body with the fields that a request needs, and what makes an example of it.
function exampleOf(schema, schemas, depth = 0) {
  if (schema.$ref) return exampleOf(schemas[nameOf(schema.$ref)] ?? {}, schemas, depth);
  if (schema.anyOf) return exampleOf(schema.anyOf.find((each) => each.type !== "null") ?? {}, schemas, depth);
  if (schema.enum) return schema.enum[0];
  if (schema.const !== undefined) return schema.const;
  if (schema.type === "object") {
    const fields = Object.entries(schema.properties ?? {}).filter(([name]) => schema.required?.includes(name));
    return depth >= EXAMPLE_DEPTH ? {} : Object.fromEntries(fields.map(([name, field]) => [name, known(name) ?? exampleOf(field, schemas, depth + 1)]));
  }
  if (schema.type === "array") return depth >= EXAMPLE_DEPTH || !schema.items ? [] : [exampleOf(schema.items, schemas, depth + 1)];
  return { string: "Hello", integer: Math.max(schema.minimum ?? 1, 1), number: 1, boolean: true }[schema.type] ?? "Hello";
}

function known(name) {
  return { messages: [{ role: "user", content: "Hello" }], prompt: "Hello", input: "Hello" }[name];
}

function curlOf(method, path, body) {
  const url = new URL(path, location.origin).href.replace(/%7B/g, "{").replace(/%7D/g, "}");
  if (body === undefined) return `curl ${method === "GET" ? "" : `-X ${method} `}${url}`;
  return `curl ${url} --json '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
}

function operationNode(method, path, operation, schemas) {
  const body = operation.requestBody?.content["application/json"]?.schema;
  const answer = operation.responses["200"].content ?? {};
  const [first, ...more] = operation.summary.split("\n");
  const inside = more.join("").trim() ? [element("p", {}, more.join("\n").trim())] : [];
  if (operation.parameters) {
    const rows = operation.parameters.map((each) => [each.name, { ...each.schema, ...(each.in === "path" ? {} : { default: each.schema.default }) }]);
    inside.push(element("h3", {}, "In the address"), fieldsTable({ properties: Object.fromEntries(rows), required: operation.parameters.filter((each) => each.required).map((each) => each.name) }));
  }
  if (body) inside.push(element("h3", {}, "Body"), fieldsTable(body.$ref ? schemas[nameOf(body.$ref)] : body));
  const kinds = Object.entries(answer).map(([kind, { schema }]) => element("p", {}, `${kind}: `, ...(kind === "application/json" ? typeNodes(schema) : ["events, each a line of data"])));
  inside.push(element("h3", {}, "Answer"), ...kinds);
  inside.push(element("h3", {}, "Example"), codeBlock(curlOf(method, path, body && exampleOf(body, schemas)), "shell"));
  const summary = element("summary", {}, element("span", { class: `method ${method.toLowerCase()}` }, method), element("code", {}, path), element("span", { class: "note" }, first));
  const node = element("details", { class: "operation", id: operation.operationId }, summary, element("div", { class: "inside" }, ...inside));
  const fields = Object.keys((body?.$ref ? schemas[nameOf(body.$ref)] : body)?.properties ?? {});
  node.dataset.words = [path, operation.summary, ...fields].join(" ").toLowerCase();
  return node;
}

function showDocs({ info, paths, components }) {
  const byId = (id) => document.getElementById(id);
  byId("version").textContent = info.version;
  const groups = new Map();
  let count = 0;
  for (const [path, operations] of Object.entries(paths)) {
    if (path.startsWith("/page/")) continue; // files of these pages
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "Others";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationNode(method.toUpperCase(), path, operation, components.schemas));
      count += 1;
    }
  }
  const order = ["OpenAI", "OpenAI Responses", "Anthropic", "Ollama"];
  const place = (tag) => (order.includes(tag) ? order.indexOf(tag) : order.length);
  const sorted = [...groups].sort(([a], [b]) => place(a) - place(b));
  byId("operations").replaceChildren(...sorted.map(([tag, nodes]) => element("div", { class: "tag" }, element("h3", { class: "group" }, tag), ...nodes)));
  byId("types").replaceChildren(...Object.entries(components.schemas).sort(([a], [b]) => a.localeCompare(b)).map(([name, schema]) => {
    const about = schema.description ? [element("p", { class: "note" }, schema.description)] : [];
    return element("details", { class: "type", id: name }, element("summary", {}, element("code", {}, name)), element("div", { class: "inside" }, ...about, fieldsTable(schema)));
  }));
  const find = () => {
    const wanted = byId("find").value.trim().toLowerCase();
    let shown = 0;
    for (const node of document.querySelectorAll(".operation")) {
      node.hidden = !node.dataset.words.includes(wanted);
      shown += !node.hidden;
    }
    for (const group of document.querySelectorAll(".tag")) group.hidden = !group.querySelector(".operation:not([hidden])");
    byId("docs-note").textContent = wanted ? `${shown} of ${count} operations` : `${count} operations. Errors have the type of their interface; ErrorBody is OpenAI's.`;
  };
  byId("find").addEventListener("input", find);
  find();
  openTarget();
}

// A link to a type or an operation opens it.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!(target instanceof HTMLDetailsElement)) return;
  target.open = true;
  target.scrollIntoView();
}

async function startDocs() {
  try {
    showDocs(await (await request("/openapi.json")).json());
  } catch (error) {
    document.getElementById("docs-note").textContent = error instanceof ServerError ? error.message : `The description can not be shown: ${error.message}`;
  }
}

window.addEventListener("hashchange", openTarget);
startDocs();
