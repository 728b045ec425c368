// Values with their units, for people.

const DIGITS = new Map();

function number(value, digits) {
  if (!DIGITS.has(digits)) DIGITS.set(digits, new Intl.NumberFormat("en", { maximumSignificantDigits: digits }));
  return DIGITS.get(digits).format(value);
}

function scaled(value, steps) {
  const [size, unit] = steps.find(([size]) => Math.abs(value) >= size) ?? steps[steps.length - 1];
  return `${number(value / size, 3)}${unit}`;
}

const told = (show) => (value) => (value === null || value === undefined ? "–" : show(value));

export const seconds = told((s) => (s === 0 ? "0" : scaled(s, [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]])));
export const count = told((n) =>
  Math.abs(n) < 1e4 ? number(n, Math.abs(n) < 1000 ? 3 : 4) : scaled(n, [[1e9, " G"], [1e6, " M"], [1e3, " k"]]));
export const perSecond = told((n) => `${count(n)}/s`);
export const bytes = told((n) => scaled(n, [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"], [1, " B"]]));
export const bytesPerSecond = told((n) => (n === 0 ? "0 B/s" : `${bytes(n)}/s`));
export const share = told((part) => `${number(part * 100, part > 0.9 ? 3 : 2)} %`);
export const whole = told((n) => new Intl.NumberFormat("en").format(Math.round(n)));

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

export const clock = (at) => CLOCK.format(at * 1000);
export const minute = (at) => MINUTE.format(at * 1000);

/** Steps of 1, 2 or 5 that divide 0 … most into about `about` parts. */
export function niceStep(most, about) {
  const raw = most / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((step) => step * power >= raw * 0.999) * power;
}
