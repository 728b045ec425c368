// The nodes and what flows between them, as a picture: on the left those that are for prompts first, by their role or as
// they lean, on the right those for tokens, between them those that are for neither first.

import { html, keyed, say, set, svg } from "./dom.js";
import { bytesPerSecond, count, perSecond, share, whole } from "./units.js";

const ORDER = ["prefill", "unified", "decode"];
const NAMES = { prefill: "prefill", unified: "prefill and decode", decode: "decode" };
const LEANING = { prefill: "prompts first", decode: "tokens first" };
const HEAD = 26;
const GAP = 10;
const MOST_MOVING = 24; // flows that are seen to move: the widest

const sideOf = (node) => (ORDER.includes(node.leaning) ? node.leaning : "unified");
const leans = (node) => node.role === "unified" && node.leaning !== "unified";

export class Topology {
  constructor(parent, tableOfNodes) {
    this.table = tableOfNodes;
    this.flows = svg("g", { class: "flows" });
    this.heads = svg("g", { class: "heads" });
    this.tiles = svg("g", { class: "tiles" });
    this.picture = svg("svg", { role: "group", "aria-label": "Nodes" }, this.flows, this.heads, this.tiles);
    parent.append(this.picture);
    this.now = null;
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      if (this.now) this.draw(this.now);
    }).observe(parent);
  }

  draw(now) {
    this.now = now;
    const place = (node) => ORDER.indexOf(sideOf(node));
    now.nodes.sort((a, b) => place(a) - place(b) || a.id.localeCompare(b.id, "en", { numeric: true }));
    drawTable(this.table, now.nodes);
    if (!this.width) return;
    const places = this.#places(now.nodes);
    set(this.picture, { width: this.width, height: places.height });
    keyed(this.heads, places.heads, (head) => head.role, () => svg("text", { "text-anchor": "middle" }),
      (text, head) => say(set(text, { x: head.x, y: 14 }), head.text));
    keyed(this.tiles, now.nodes, (node) => node.id, makeTile, (tile, node) =>
      drawTile(tile, node, places.of.get(node.id)));
    const flows = now.flows.filter(([source, sink]) => places.of.has(source) && places.of.has(sink));
    const widest = Math.max(1, ...flows.map(([, , , tokens]) => tokens));
    set(this.flows, { class: flows.length > MOST_MOVING ? "flows many" : "flows" });
    const moving = new Set(flows.slice(0, MOST_MOVING));
    keyed(this.flows, flows, ([source, sink]) => JSON.stringify([source, sink]),
      () => svg("g", {}, svg("title"), svg("path", { class: "road" }), svg("path", { class: "moving" })),
      (group, flow) => drawFlow(group, flow, places, widest, moving.has(flow)));
  }

  /** Where each node's tile is. Each role has columns of tiles, and between the roles there is room for flows. */
  #places(nodes) {
    const groups = ORDER.map((role) => [role, nodes.filter((node) => sideOf(node) === role)])
      .filter(([, members]) => members.length);
    const isNarrow = this.width < 560;
    const isDense = nodes.length > (isNarrow ? 8 : 24);
    const most = Math.max(1, Math.floor((isNarrow ? 4 : this.width / 120) / groups.length));
    const columnsOf = (members) => {
      const wanted = Math.ceil(members.length / 8);
      return Math.min(most, groups.length === 1 && members.length > 1 ? Math.max(2, wanted) : wanted);
    };
    const numColumns = groups.reduce((sum, [, members]) => sum + columnsOf(members), 0);
    const between = groups.length > 1 ? (this.width * (isNarrow ? 0.2 : 0.28)) / (groups.length - 1) : 0;
    const inside = groups.length > 1 ? this.width : Math.min(this.width, numColumns * 400);
    const room = (inside - between * (groups.length - 1)) / numColumns;
    const size = { w: Math.max(48, Math.min(groups.length === 1 ? room * 0.62 : room - GAP, 260)), h: isDense ? 26 : 60, isDense };
    const rows = Math.max(0, ...groups.map(([, members]) => Math.ceil(members.length / columnsOf(members))));
    const height = HEAD + rows * (size.h + GAP);
    const of = new Map();
    const heads = [];
    let left = (this.width - inside) / 2;
    groups.forEach(([role, members], group) => {
      const columns = columnsOf(members);
      const tall = Math.ceil(members.length / columns);
      const shift = groups.length === 1 ? 0.5 : group / (groups.length - 1); // outer tiles lie at the edges
      members.forEach((node, i) => {
        const column = Math.floor(i / tall);
        const inColumn = Math.min(tall, members.length - column * tall);
        const top = HEAD + ((rows - inColumn) * (size.h + GAP)) / 2;
        of.set(node.id, { ...size, x: left + column * room + shift * (room - size.w),
          y: top + (i % tall) * (size.h + GAP) });
      });
      const inner = columns * room - (room - size.w);
      heads.push({ role, x: left + shift * (room - size.w) + inner / 2, 
        text: `${members.some(leans) ? LEANING[role] : NAMES[role]} · ${members.length}` });
      left += columns * room + between;
    });
    if (groups.length === 2 && !isNarrow) heads.push({ role: "flows", x: this.width / 2, text: total(this.now.flows) });
    return { of, heads, height };
  }
}

// --- a node --------------------------------------------------------------------------------------------------

function makeTile() {
  const part = (tag, name) => svg(tag, { class: name });
  return svg("g", { tabindex: "0", role: "img" }, svg("title"), part("rect", "tile"), part("rect", "room"),
    part("rect", "kv"), part("text", "name"), part("text", "load"), part("text", "pace"), part("rect", "idle"), part("rect", "prompt"),
    part("rect", "token"));
}

function drawTile(tile, node, { x, y, w, h, isDense }) {
  const [title, back, room, kv, name, load, pace, idle, prompt, token] = tile.children;
  const used = node.shares.pool ?? 0;
  set(tile, { class: `node ${sideOf(node)} ${node.state}`, transform: `translate(${x.toFixed(1)} ${y})` });
  set(back, { width: w, height: h, rx: 7 });
  const tall = h - 12;
  set(room, { x: 6, y: 6, width: 6, height: tall, rx: 3 });
  set(kv, { x: 6, y: 6 + tall * (1 - used), width: 6, height: tall * used, rx: Math.min(3, (tall * used) / 2) });
  const letters = Math.max(3, Math.floor((w - 24) / 8));
  say(set(name, { x: 19, y: isDense ? 14 : 19 }), shortName(node, letters));
  say(set(load, { x: 19, y: 36 }), isDense ? "" : loadOf(node, letters));
  const hasRoom = !isDense && w > 190;
  say(set(pace, { x: w - 8, y: 36, "text-anchor": "end" }), hasRoom ? paceOf(node) : "");
  const wide = Math.max(1, w - 27);
  const prompts = node.busy * (node.prompt_share ?? 0) * wide;
  const bar = { y: h - (isDense ? 9 : 13), height: isDense ? 3 : 5 };
  set(idle, { ...bar, x: 19, width: wide, rx: 1.5 });
  set(prompt, { ...bar, x: 19, width: prompts.toFixed(1) });
  set(token, { ...bar, x: 19 + prompts, width: Math.max(0, node.busy * wide - prompts).toFixed(1) });
  const text = described(node);
  set(tile, { "aria-label": text.replaceAll("\n", ", ") });
  say(title, text);
}

function shortName({ id, role }, letters) {
  if (id.length <= letters) return id;
  const index = id.startsWith(`${role}-`) && /^\w+-(\d+)-[0-9a-f]{6}$/.exec(id)?.[1]; // as `tandem serve` calls them
  if (index) return role.length + 1 + index.length <= letters ? `${role}-${index}` : index; // they stand below their role
  if (letters < 12) return `…${id.slice(1 - letters)}`; // what tells names apart is mostly at the end
  const end = Math.ceil(letters / 3);
  return `${id.slice(0, letters - end - 1)}…${id.slice(-end)}`;
}

function loadOf(node, letters) {
  if (node.state !== "serving") return node.state;
  const long = `${whole(node.running)} run, ${whole(node.waiting)} wait`;
  if (long.length <= letters) return long;
  return node.waiting ? `${count(node.running)} + ${count(node.waiting)}` : `${count(node.running)} run`;
}

/** What it mostly makes. */
function paceOf(node) {
  if (!node.busy) return "";
  return node.prompt_share > 0.5 ? `reads ${count(node.prompt_tokens_per_s)} tokens/s`
    : `writes ${count(node.rows_per_s)} tokens/s`;
}

function leaning(node) {
  if (!node.busy || node.prompt_share === null) return "idle";
  return `busy ${share(node.busy)}: ${share(node.prompt_share)} prompts, ${share(1 - node.prompt_share)} tokens`;
}

function described(node) {
  const why = leans(node) ? [`${LEANING[node.leaning]}${node.why ? `: ${node.why}` : ""}`] : [];
  return [`${node.id} (${node.role}, ${node.state})`, ...why, leaning(node),
    `${whole(node.running)} run, ${whole(node.waiting)} wait (${whole(node.waiting_tokens)} prompt tokens)`,
    `KV: ${Object.entries(node.shares).map(([tier, used]) => `${tier} ${share(used)}`).join(", ")}`,
    `pushes ${bytesPerSecond(node.pushed_per_s)}`].join("\n");
}

// --- a flow --------------------------------------------------------------------------------------------------

function drawFlow(group, [source, sink, prompts, tokens], places, widest, isMoving) {
  const [title, road, moving] = group.children;
  const d = way(places.of.get(source), places.of.get(sink));
  const width = 1 + 7 * Math.sqrt(tokens / widest);
  set(road, { d, "stroke-width": width.toFixed(1) });
  set(moving, { d, "stroke-width": Math.min(3, width).toFixed(1), display: isMoving ? null : "none" });
  say(title, `${source} → ${sink}: ${count(prompts)} prompts/s, ${count(tokens)} tokens/s`);
}

function total(flows) {
  const sum = (index) => flows.reduce((all, flow) => all + flow[index], 0);
  return flows.length ? `${count(sum(2))} prompts/s, ${count(sum(3))} tokens/s handed over` : "nothing handed over";
}

function way(from, to) {
  const [y1, y2] = [from.y + from.h / 2, to.y + to.h / 2];
  if (Math.abs(from.x - to.x) < 1) { // in one column: around its right side
    const x = from.x + from.w;
    const out = x + 26 + Math.abs(y2 - y1) / 12;
    return `M${x} ${y1}C${out} ${y1} ${out} ${y2} ${x} ${y2}`;
  }
  const goesRight = to.x > from.x;
  const x1 = goesRight ? from.x + from.w : from.x;
  const x2 = goesRight ? to.x : to.x + to.w;
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

// --- as a table ----------------------------------------------------------------------------------------------

const tier = (name) => (node) => share(node.shares[name] ?? null);
const COLUMNS = [
  ["node", (node) => node.id], ["role", (node) => (leans(node) ? LEANING[node.leaning] : node.role)],
  ["state", (node) => node.state],
  ["running", (node) => whole(node.running)], ["waiting", (node) => whole(node.waiting)],
  ["KV", tier("pool")], ["host", tier("host")], ["disk", tier("disk")],
  ["busy", (node) => share(node.busy)], ["of it prompts", (node) => share(node.prompt_share)],
  ["prompt tokens", (node) => perSecond(node.prompt_tokens_per_s)], ["rows", (node) => perSecond(node.rows_per_s)],
  ["pushes", (node) => bytesPerSecond(node.pushed_per_s)], ["version", (node) => node.version],
];

function drawTable(table, nodes) {
  if (!table.tHead.rows.length) {
    table.tHead.append(html("tr", {}, ...COLUMNS.map(([name]) => html("th", { scope: "col" }, name))));
  }
  keyed(table.tBodies[0], nodes, (node) => node.id, () => html("tr", {}, ...COLUMNS.map(() => html("td"))),
    (row, node) => COLUMNS.forEach(([, show], i) => say(row.cells[i], show(node))));
}
