// One chart over time: lines or stacked areas, axes with units, and a cursor that all charts share.

import { html, say, set, svg } from "./dom.js";
import { clock, minute, niceStep } from "./units.js";

const HEIGHT = 150;
const TOP = 14;
const BOTTOM = 20;

export class Chart {
  /** `onCursor(time | null)` is called when somebody points at a time. */
  constructor(spec, history, onCursor) {
    this.spec = spec;
    this.history = history;
    this.onCursor = onCursor;
    this.width = 0;
    this.values = new Map();
    this.rare = new Map(); // entries of a stack that are shown while there is something
    this.legend = html("ul", { class: "legend" });
    for (const [name, label, colour] of spec.lines) this.#entry(name, label, colour);
    for (const [name, label] of spec.notes ?? []) this.#entry(name, label, null);
    this.axes = svg("g", { class: "axes" });
    this.marks = svg("g", { class: "marks" });
    this.labels = svg("g", { class: "labels" });
    this.cursor = svg("g", { class: "cursor" });
    this.picture = svg("svg", { height: HEIGHT, "aria-hidden": "true" }, this.axes, this.marks, this.labels,
      this.cursor);
    this.plot = html("div", { class: "plot", tabindex: "0", role: "img" }, this.picture);
    this.element = html("section", { class: "card chart", id: `chart-${spec.id}` },
      html("h3", { title: spec.help }, spec.title), this.legend, this.plot);
    this.#listen();
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.draw();
    }).observe(this.plot);
  }

  #entry(name, label, colour) {
    const value = html("b");
    this.values.set(name, value);
    const swatch = colour === null ? [] : [html("i", { class: `swatch ${colour}` })];
    const entry = html("li", {}, ...swatch, `${label} `, value);
    if (this.spec.stacked && name !== this.spec.lines[0][0]) this.rare.set(name, entry);
    this.legend.append(entry);
  }

  #listen() {
    const point = (event) => this.onCursor(this.#time(event.offsetX));
    this.plot.addEventListener("pointermove", point);
    this.plot.addEventListener("pointerdown", point);
    this.plot.addEventListener("pointerleave", () => this.onCursor(null));
    this.plot.addEventListener("blur", () => this.onCursor(null));
    this.plot.addEventListener("keydown", (event) => {
      const { history } = this;
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[event.key];
      if (step) {
        const last = history.at.length - 1;
        this.onCursor(history.at[Math.max(0, Math.min(last, history.told + step))]);
        event.preventDefault();
      } else if (event.key === "Escape") this.onCursor(null);
    });
  }

  #time(x) {
    const [first, last] = this.history.domain;
    return first + (Math.max(0, Math.min(this.width, x)) / this.width) * (last - first);
  }

  /** Draws it all anew: some hundred points a line, once a second. */
  draw() {
    const { history, spec } = this;
    if (!this.width || !history.at.length) return;
    const [first, last] = history.domain;
    this.from = Math.max(0, history.near(first) - 1);
    this.x = (time) => ((time - first) / (last - first)) * this.width;
    const columns = this.#columns();
    const [low, high] = this.#range(columns);
    this.y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    set(this.picture, { width: this.width });
    this.#drawAxes(first, last, low, high);
    for (const [name, entry] of this.rare) {
      entry.hidden = !history.series[name]?.slice(this.from).some((value) => value > 0);
    }
    this.marks.replaceChildren(...columns.map((column, i) => this.#mark(column, columns[i - 1], spec.lines[i][2])));
    this.drawCursor();
  }

  /** Each line's values from `from` on; of a stacked chart with those below it added. */
  #columns() {
    let below = null;
    return this.spec.lines.map(([name]) => {
      const column = (this.history.series[name] ?? []).slice(this.from);
      if (!this.spec.stacked) return column;
      below = column.map((value, i) => (value === null ? null : value + (below?.[i] ?? 0)));
      return below;
    });
  }

  #range(columns) {
    let low = 0;
    let high = this.spec.most ?? 0;
    for (const column of columns) {
      for (const value of column) {
        if (value > high) high = value;
        if (value < low) low = value;
      }
    }
    if (high === low) high = low + 1;
    const step = niceStep(high - low, 3);
    this.step = step;
    return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }

  #drawAxes(first, last, low, high) {
    const [lines, labels] = [[], []];
    for (let value = low; value <= high + this.step / 2; value += this.step) {
      const y = Math.round(this.y(value)) + 0.5;
      const rounded = Math.abs(value) < this.step / 1e6 ? 0 : value;
      lines.push(svg("line", { x1: 0, x2: this.width, y1: y, y2: y, class: rounded ? "grid" : "base" }));
      if (rounded || this.spec.zero) labels.push(svg("text", { x: 0, y: y - 3 }, this.spec.unit(rounded)));
    }
    const most = Math.max(2, Math.floor(this.width / 75));
    const every = [15, 30, 60, 120, 300].find((s) => (last - first) / s <= most) ?? 300;
    for (let time = Math.ceil(first / every) * every; time <= last; time += every) {
      const x = this.x(time);
      if (x < 24 || x > this.width - 24) continue;
      const label = every < 60 ? clock(time) : minute(time);
      labels.push(svg("text", { x, y: HEIGHT - 4, "text-anchor": "middle" }, label));
    }
    this.axes.replaceChildren(...lines);
    this.labels.replaceChildren(...labels);
  }

  #mark(column, below, colour) {
    if (!column.some((value) => value)) return ""; // nothing is no line on the axis
    const { at } = this.history;
    const pieces = []; // of points that follow one another
    column.forEach((value, i) => {
      if (value === null) return;
      if (i === 0 || column[i - 1] === null) pieces.push([]);
      const under = this.spec.stacked ? below?.[i] ?? 0 : null;
      pieces[pieces.length - 1].push([this.x(at[this.from + i]), this.y(value), under]);
    });
    const line = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const paths = pieces.map((points) => {
      if (points.length === 1) return `${line(points)}h1`;
      if (!this.spec.stacked) return line(points);
      const back = points.map(([x, , under]) => [x, this.y(under)]).reverse();
      return `${line(points)}${line(back).replace("M", "L")}Z`;
    });
    return svg("path", { d: paths.join(""), class: `${this.spec.stacked ? "area" : "line"} ${colour}` });
  }

  /** Draws the cursor, and what legends tell. */
  drawCursor() {
    const { history, spec } = this;
    if (!this.x) return;
    const index = history.told;
    const parts = [];
    if (history.cursor !== null) {
      const x = Math.max(0, Math.min(this.width, this.x(history.at[index])));
      const isRight = x > this.width / 2;
      parts.push(svg("line", { x1: x, x2: x, y1: TOP - 10, y2: HEIGHT - BOTTOM }));
      const place = { x: x + (isRight ? -5 : 5), y: TOP - 3, "text-anchor": isRight ? "end" : "start" };
      parts.push(svg("text", place, clock(history.at[index])));
    }
    this.cursor.replaceChildren(...parts);
    const told = [];
    for (const [name, label] of spec.lines) {
      const text = spec.unit(history.value(name, index));
      say(this.values.get(name), text);
      told.push(`${label} ${text}`);
    }
    for (const [name, , unit] of spec.notes ?? []) say(this.values.get(name), unit(history.value(name, index)));
    set(this.plot, { "aria-label": `${spec.title}, ${clock(history.at[index])}: ${told.join(", ")}. Arrows go back.` });
  }
}
