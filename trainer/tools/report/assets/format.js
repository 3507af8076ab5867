"use strict";
// The data of the page, and numbers as text.

const page = JSON.parse(document.getElementById("data").textContent);
const decoded = new Map();

/** Return array `i` of the data as numbers. */
function array(i) {
  if (!decoded.has(i)) {
    const { bytes, text } = page.arrays[i];
    const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
    decoded.set(i, bytes === 8 ? new Float64Array(raw) : new Float32Array(raw));
  }
  return decoded.get(i);
}

const MINUS = "\u2212", MICRO = "\u00b5", THIN = "\u202f", DASH = "\u2013", DEGREE = "\u00b0";

/** Round to a number of significant digits, without an exponent where that is readable. */
function digits(value, places) {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential(Math.max(0, places - 2)).replace("e+", "e");
  const decimals = size ? Math.max(0, places - 1 - Math.floor(Math.log10(size))) : 0;
  const text = value.toFixed(Math.min(decimals, 12));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Return [factor, suffix] for numbers of this size. */
function scaleOf(size, kind) {
  if (kind === "seconds") {
    if (size >= 7200) return [1 / 3600, "h"];
    if (size >= 120) return [1 / 60, "min"];
    return size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, MICRO + "s"];
  }
  if (kind === "share") return [100, "%"];
  if (kind === "C") return [1, DEGREE + "C"];
  if (["GiB", "MiB", "MiB/s", "W", "MHz"].includes(kind)) return [1, kind];
  if (kind === "plain" || size < 1e4) return [1, ""];
  return size >= 1e9 ? [1e-9, "G"] : size >= 1e6 ? [1e-6, "M"] : [1e-3, "k"];
}

/** Format a value with its unit. */
function format(value, kind, places = 4) {
  if (!Number.isFinite(value)) return "not finite";
  if (value === 0) return "0";
  if (kind === "step" || kind === "samples" || kind === "count") return Math.round(value).toLocaleString("en-US");
  const [factor, suffix] = scaleOf(Math.abs(value), kind);
  const number = value * factor;
  const text = Math.abs(number) >= 1e4 && Math.abs(number) < 1e15 && kind !== "plain"
    ? Math.round(number).toLocaleString("en-US") : digits(number, places);
  const gap = !suffix || suffix === "%" || ["k", "M", "G"].includes(suffix) ? "" : THIN;
  return text.replace("-", MINUS) + gap + suffix;
}

/** Format the ticks of an axis alike: one unit, and as many decimals as their distance needs. */
function formatTicks(ticks, kind) {
  const size = Math.max(...ticks.map(Math.abs), 0);
  let [factor, suffix] = scaleOf(size, kind === "step" || kind === "samples" ? "rate" : kind);
  if (kind === "plain" && size >= 1e5) [factor, suffix] = scaleOf(size, "rate");
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) * factor : size * factor || 1;
  if (size && size * factor < 1e-3) return ticks.map((t) => (t ? t.toExponential(1).replace("e-", "e" + MINUS) : "0"));
  let decimals = Math.min(8, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  if (Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals++; // steps of 2.5
  const short = ["%", "k", "M", "G"].includes(suffix) ? suffix : suffix ? THIN + suffix : "";
  return ticks.map((t) => (t === 0 ? "0" : (t * factor).toFixed(decimals).replace("-", MINUS) + short));
}

/** Return round numbers within [low, high], about `count`. */
function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find((n) => n * power >= rough * 0.999) || 10);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && ticks.length < 50; i++) ticks.push(i * step);
  return ticks;
}

/** Return the powers of ten within [low, high] (logarithms); their 2 and 5 too, if there are few. */
function logTicks(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 6)), ticks = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e += every)
    for (const m of high - low < 2 ? [1, 2, 5] : [1]) {
      const at = e + Math.log10(m);
      if (at >= low - 1e-9 && at <= high + 1e-9) ticks.push(at);
    }
  return ticks.length > 1 ? ticks : [low, (low + high) / 2, high];
}

/** Return the index of the entry of a sorted array that is nearest to x. */
function nearest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
}

/** Interpolate y, given at sorted x, at one place; outside of x, the nearest end's. */
function interpolate(x, y, at) {
  const i = nearest(x, at), j = x[i] < at ? i + 1 : i - 1;
  if (x[i] === at || j < 0 || j >= x.length || x[i] === x[j]) return y[i];
  return y[i] + ((y[j] - y[i]) * (at - x[i])) / (x[j] - x[i]);
}

/** Return the exponential moving average without its bias to the first value, as TensorBoard smooths. */
function smoothed(values, weight) {
  if (!weight) return values;
  const out = new Float64Array(values.length).fill(NaN);
  let mean = 0, count = 0;
  for (let i = 0; i < values.length; i++) {
    if (!Number.isFinite(values[i])) continue;
    mean = mean * weight + (1 - weight) * values[i];
    count++;
    out[i] = mean / (1 - weight ** count);
  }
  return out;
}
