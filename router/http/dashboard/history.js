// What is kept of the feed's points: a column of values for each series, the newest last.

export class History {
  constructor() {
    this.at = [];
    this.series = {};
    this.kept = 600;
    this.cursor = null; // the time that somebody points at
    this.span = 600; // seconds that are shown
  }

  replace(past) {
    this.at = past.at;
    this.series = past.series;
    this.kept = past.kept_ticks;
  }

  add(at, point) {
    if (this.at.length && at <= this.newest) return;
    this.at.push(at);
    for (const [name, column] of Object.entries(this.series)) column.push(point[name] ?? null);
    if (this.at.length > this.kept) for (const column of [this.at, ...Object.values(this.series)]) column.shift();
  }

  get newest() {
    return this.at[this.at.length - 1];
  }

  /** First and last time to be shown: the span, or less while there is less, and a minute at least. */
  get domain() {
    const last = this.newest;
    return [Math.max(last - this.span, Math.min(this.at[0], last - 60)), last];
  }

  /** The index of the point nearest to a time, by halves. */
  near(time) {
    let low = 0;
    let high = this.at.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.at[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low > 0 && time - this.at[low - 1] < this.at[low] - time ? low - 1 : low;
  }

  /** The index that legends tell of: where the cursor is, or the newest. */
  get told() {
    return this.cursor === null ? this.at.length - 1 : this.near(this.cursor);
  }

  value(name, index = this.at.length - 1) {
    return this.series[name]?.[index] ?? null;
  }
}
