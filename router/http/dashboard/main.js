// The dashboard: it follows the feed (feed.js), keeps its points (history.js), and has the parts drawn once a second.

import { Chart } from "./chart.js";
import { CHARTS } from "./charts.js";
import { byId, html, keyed, say, set } from "./dom.js";
import { ask, follow } from "./feed.js";
import { History } from "./history.js";
import { Requests, nameOf } from "./requests.js";
import { Topology } from "./topology.js";
import * as units from "./units.js";
import { story } from "./waterfall.js";

const KEY = "tandem-key"; // in sessionStorage: this tab's alone
const THEMES = { "light dark": ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };

const history = new History();
const charts = CHARTS.map((spec) => new Chart(spec, history, point));
const topology = new Topology(byId("topology"), byId("nodes"));
const requests = new Requests(byId("recent"), byId("nobody"), openStory);
let facts = {}; // what doesn't change, of the event "past"
let now = null; // the newest event "now"

byId("charts").append(...charts.map((chart) => chart.element));

// --- what comes ----------------------------------------------------------------------------------------------

function onEvent(name, data) {
  if (name === "past") {
    facts = data;
    history.replace(data);
  } else if (name === "now") {
    now = data;
    for (const [at, values] of data.points) history.add(at, values);
  }
  if (!document.hidden) draw();
}

function draw() {
  if (!now || !history.at.length) return;
  set(byId("state"), { class: "live" });
  say(byId("state"), now.answering < facts.processes
    ? `live, ${now.answering} of ${facts.processes} processes answer` : "live");
  say(byId("model"), facts.model ?? "");
  document.title = facts.model ? `${facts.model} · Tandem` : "Tandem";
  byId("warning").hidden = now.ready;
  say(byId("warning"), now.ready ? "" : `Not ready: ${now.missing}`);
  const processes = facts.processes > 1 ? `all ${facts.processes} processes of this router` : "this router";
  say(byId("about"), `Tandem ${facts.version} · requests are those of ${processes}, nodes are told of by their ` +
    "heartbeats · another router shows its own requests");
  drawFigures();
  topology.draw(now);
  requests.draw(now.recent);
  for (const chart of charts) chart.draw();
}

function drawFigures() {
  const value = (name) => history.value(name);
  const [kept, missed] = [value("kept"), value("missed")];
  const promised = kept + missed;
  const figures = [
    ["First token", units.seconds(value("ttft50")), `p95 ${units.seconds(value("ttft95"))}`],
    ["Between tokens", units.seconds(value("itl50")), `p95 ${units.seconds(value("itl95"))}`],
    ["Output", units.count(value("out_tokens")), "tokens a second"],
    ["Goodput", promised ? units.share(kept / promised) : "–", promised ? `${units.perSecond(kept)} in time`
      : `no targets; ${units.perSecond(value("finished"))} finished`],
    ["Running", units.whole(value("running")), `${units.whole(value("queued") + value("unplaced"))} wait`],
    ["KV in use", units.share(value("kv_pool")), `${now.nodes.length} nodes`],
  ];
  keyed(byId("figures"), figures, ([name]) => name,
    ([name]) => html("div", {}, html("dt", {}, name), html("dd"), html("dd", { class: "quiet" })),
    (tile, [, main, more]) => {
      say(tile.children[1], main);
      say(tile.children[2], more);
    });
}

function onLost(message) {
  set(byId("state"), { class: "lost" });
  say(byId("state"), `${message}; trying again`);
}

function point(time) {
  history.cursor = time;
  for (const chart of charts) chart.drawCursor();
}

// --- one request ---------------------------------------------------------------------------------------------

function roleOf(node) {
  return now?.nodes.find((each) => each.id === node)?.leaning ?? "";
}

async function openStory(name) {
  const dialog = byId("story");
  say(byId("story-title"), name);
  byId("story-body").replaceChildren(html("p", { class: "quiet" }, "asking the nodes …"));
  if (!dialog.open) dialog.showModal();
  window.history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  try {
    const answer = await ask(`admin/requests/${encodeURIComponent(name)}`, sessionStorage.getItem(KEY));
    const { prompts } = await answer.json();
    say(byId("story-title"), nameOf(prompts[0]));
    byId("story-body").replaceChildren(html("p", { class: "quiet" }, prompts[0].id), ...story(prompts, roleOf));
  } catch (error) {
    byId("story-body").replaceChildren(html("p", { role: "alert" }, error.message));
  }
}

function openNamed() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name) openStory(name);
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = byId("name").value.trim();
  byId("name").value = "";
  if (name) openStory(name);
});
byId("story").addEventListener("close", () => window.history.replaceState(null, "", location.pathname));
byId("story").querySelector(".close").addEventListener("click", () => byId("story").close());
byId("story").addEventListener("click", (event) => {
  if (event.target === byId("story")) byId("story").close(); // beside it
});
window.addEventListener("hashchange", openNamed);

// --- the key -------------------------------------------------------------------------------------------------

/** Asks for a key until one is given. */
function askForKey(refused) {
  const dialog = byId("ask");
  say(byId("refused"), refused);
  dialog.showModal();
  return new Promise((given) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      byId("key").value = "";
      sessionStorage.setItem(KEY, key);
      dialog.close();
      given(key);
    };
  });
}

byId("ask").addEventListener("cancel", (event) => event.preventDefault()); // there is nothing to see without one

// --- how it looks --------------------------------------------------------------------------------------------

function showTheme(theme) {
  const [sign, name] = THEMES[theme];
  document.documentElement.style.colorScheme = theme;
  say(byId("theme"), sign);
  set(byId("theme"), { "aria-label": `Colours: ${name}`, title: `Colours: ${name}` });
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(localStorage.getItem("tandem-theme") ?? names[0]) + 1) % names.length];
  localStorage.setItem("tandem-theme", next);
  showTheme(next);
});
showTheme(localStorage.getItem("tandem-theme") in THEMES ? localStorage.getItem("tandem-theme") : "light dark");

for (const button of byId("span").children) {
  button.addEventListener("click", () => {
    for (const each of byId("span").children) set(each, { "aria-pressed": String(each === button) });
    history.span = Number(button.dataset.value);
    draw();
  });
}
document.addEventListener("visibilitychange", () => document.hidden || draw());

follow("admin/feed", sessionStorage.getItem(KEY), { event: onEvent, lost: onLost, key: askForKey }).then();
openNamed();
