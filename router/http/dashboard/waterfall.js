// One request as a waterfall: what the router and each node did for it, in order of time.

import { html } from "./dom.js";
import { niceStep, seconds, share, whole } from "./units.js";

// The kinds of moments of router/watching/telling.py: their colour, and the word that stands for them in the legend.
const KINDS = {
  queue: ["plain", "queue"],
  chunk: ["prompt", "prefill"],
  push: ["violet", "KV pushed"],
  verify: ["good", "verified"],
  commit: ["good", "verified"],
  tokens: ["token", "tokens"],
  moved: ["warm", "moved"],
  left: ["warm", "moved"],
  stayed: ["warm", "moved"],
  refused: ["bad", "refused"],
  node_lost: ["bad", "refused"],
};
const colourOf = (moment) => KINDS[moment.kind]?.[0] ?? "mild";
const LONG = 2; // tokens that take so many times as long as the rest are left out at first

/** What is shown of a story: `prompts` is what /admin/requests/NAME answers, `roleOf(node)` a node's role. */
export function story(prompts, roleOf) {
  return prompts.map((prompt, i) => html("article", {},
    ...(prompts.length > 1 ? [html("h3", {}, `prompt ${i + 1} of ${prompts.length}`)] : []),
    summary(prompt), ...waterfall(prompt, roleOf)));
}

function summary(prompt) {
  const { ttft, tpot } = prompt.targets_s;
  const facts = [
    ["state", prompt.state],
    ["first token", seconds(prompt.ttft_s) + (ttft ? ` of ${seconds(ttft)}` : "")],
    ["per token", seconds(prompt.tpot_s) + (tpot ? ` of ${seconds(tpot)}` : "")],
    ["whole", seconds(prompt.duration_s)],
    ["prompt", `${whole(prompt.prompt_tokens)} tokens`],
    ["of it cached", share(prompt.cached_tokens / prompt.prompt_tokens)],
    ["output", `${whole(prompt.output_tokens)} of ${whole(prompt.max_tokens * prompt.samples)} tokens`],
    ["longest pause", seconds(prompt.longest_gap_s || null)],
    ["promise", prompt.kept === null ? (ttft || tpot ? "open" : "none") : prompt.kept ? "kept" : "missed"],
  ];
  if (prompt.attempts > 1) facts.push(["attempts", whole(prompt.attempts)]);
  if (prompt.silent_nodes.length) facts.push(["does not tell", prompt.silent_nodes.join(", ")]);
  return html("dl", { class: "facts" }, ...facts.flatMap(([name, value]) =>
    [html("div", {}, html("dt", {}, name), html("dd", {}, value))]));
}

function waterfall(prompt, roleOf) {
  const endOf = (moment) => moment.at_s + moment.lasts_s;
  const whole = Math.max(1e-4, ...prompt.moments.map(endOf));
  const early = prompt.moments.filter((moment) => !["tokens", "end"].includes(moment.kind)).map(endOf);
  const beginning = Math.max(1e-4, ...early) * 1.08;
  const rows = html("ol", { class: "waterfall" });
  const draw = (until) => rows.replaceChildren(axis(until), ...prompt.moments.map((moment) =>
    row(moment, until, roleOf)));
  const isLong = whole > LONG * beginning;
  draw(isLong ? beginning : whole);
  const names = new Map(prompt.moments.filter((moment) => KINDS[moment.kind]).map((moment) => {
    const [colour, name] = KINDS[moment.kind];
    return [name, colour];
  }));
  const legend = html("ul", { class: "legend" }, ...[...names].map(([name, colour]) =>
    html("li", {}, html("i", { class: `swatch ${colour}` }), name)));
  return [html("div", { class: "head" }, legend, ...(isLong ? [spans(draw, beginning, whole)] : [])), rows];
}

function spans(draw, beginning, whole) {
  const choice = html("div", { class: "choice", role: "group", "aria-label": "Time shown" });
  for (const [name, until] of [["the prompt", beginning], ["all of it", whole]]) {
    const button = html("button", { type: "button", "aria-pressed": String(until === beginning) }, name);
    button.addEventListener("click", () => {
      for (const each of choice.children) each.setAttribute("aria-pressed", String(each === button));
      draw(until);
    });
    choice.append(button);
  }
  return choice;
}

function axis(until) {
  const track = html("div", { class: "track" });
  const step = niceStep(until, 4);
  for (let at = 0; at <= until * 0.88; at += step) {
    const tick = html("span", {}, seconds(Number(at.toPrecision(6))));
    tick.style.left = `${(at / until) * 100}%`;
    track.append(tick);
  }
  return html("li", { class: "axis", "aria-hidden": "true" }, html("span"), html("span"), track);
}

function row(moment, until, roleOf) {
  const bar = html("i", { class: `${moment.lasts_s ? "bar" : "mark"} ${colourOf(moment)}` });
  const begin = Math.min(1, moment.at_s / until);
  bar.style.left = `${begin * 100}%`;
  if (moment.lasts_s) bar.style.width = `${Math.min(1 - begin, moment.lasts_s / until) * 100}%`;
  if (moment.at_s > until) bar.hidden = true;
  const lasts = moment.lasts_s ? `for ${seconds(moment.lasts_s)}` : "";
  return html("li", { "data-kind": moment.kind, title: `${moment.where}: ${moment.text}` },
    html("span", { class: `where ${roleOf(moment.where)}` }, moment.where || "–"),
    html("span", { class: "what" }, moment.text,
      html("small", {}, ` at ${seconds(moment.at_s)} ${lasts}`.trimEnd())),
    html("div", { class: "track" }, bar));
}
