// The newest requests, as a table; a click shows one request's story.

import { html, keyed, say, set } from "./dom.js";
import { clock, seconds, share, whole } from "./units.js";

const RUNNING = ["queued", "prefilling", "streaming"];
const PROMISE = new Map([[true, "kept"], [false, "missed"], [null, "–"]]);

export function stateOf(request) {
  return RUNNING.includes(request.state) ? "running" : request.state === "finished" ? "good" : "bad";
}

// [name, what it shows, whether it is left out where there is little room]
const COLUMNS = [
  ["at", (request) => clock(request.at), true],
  ["prompt", (request) => whole(request.prompt_tokens), false],
  ["cached", (request) => share(request.duration_s === null ? null : request.cached_tokens / request.prompt_tokens), true],
  ["output", (request) => whole(request.output_tokens), true],
  ["first token", (request) => seconds(request.ttft_s), false],
  ["per token", (request) => seconds(request.tpot_s), true],
  ["whole", (request) => seconds(request.duration_s), true],
  ["nodes", (request) => request.nodes.join(" → ") || "–", true],
  ["promise", (request) => PROMISE.get(request.kept), true],
];

export class Requests {
  constructor(table, empty, onOpen) {
    this.body = table.tBodies[0];
    this.empty = empty;
    this.onOpen = onOpen;
    const heads = COLUMNS.map(([name, , isWide]) => html("th", { scope: "col", class: isWide ? "wide" : "" }, name));
    table.tHead.append(html("tr", {}, html("th", { scope: "col" }, "request"), ...heads));
  }

  draw(requests) {
    this.empty.hidden = requests.length > 0;
    keyed(this.body, requests, (request) => request.id, (request) => this.#row(request), drawRow);
  }

  #row(request) {
    const open = html("button", { type: "button", class: "link" });
    open.addEventListener("click", () => this.onOpen(request.id));
    const cells = COLUMNS.map(([, , isWide]) => html("td", { class: isWide ? "wide" : "" }));
    return html("tr", {}, html("th", { scope: "row" }, html("i", { class: "dot" }), open), ...cells);
  }
}

/** What people call a request: their name for it, or else its own id. */
export function nameOf(request) {
  return request.names.find((each) => each !== request.id && !request.id.includes(each)) ?? request.id;
}

function drawRow(row, request) {
  const [dot, open] = row.cells[0].children;
  set(dot, { class: `dot ${stateOf(request)}`, title: request.state });
  const name = nameOf(request);
  say(open, name);
  set(open, { "aria-label": `${name}, ${request.state}: show its story`, title: request.names.join("\n") });
  COLUMNS.forEach(([, show], i) => say(row.cells[i + 1], show(request)));
}
