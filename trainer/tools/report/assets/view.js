// What all charts share: the horizontal axis and its range, the crosshair, the shown runs, the colours.

const view = {
  axis: "step", // or "seconds", "samples"
  range: null, // [low, high] of the axis; null: all
  cursor: null, // a place on the axis
  smooth: 0, // weight of the moving average
  events: true,
  hidden: new Set(), // runs
  without: new Set(["validation"]), // parts of a step; a validation would dwarf all others
};
const charts = [];
const placed = new Map(); // places on the axis, by axis, run and array

/** Return where the steps of array `i` lie on the axis; null if the run has no such axis. */
function places(i, run) {
  if (view.axis === "step") return array(i);
  const key = `${view.axis} ${run} ${i}`;
  if (!placed.has(key)) {
    const axis = page.runs[run].axes[view.axis];
    const at = axis && Float64Array.from(array(i), (step) => interpolate(array(axis[0]), array(axis[1]), step));
    placed.set(key, at || null);
  }
  return placed.get(key);
}

/** Return the place of one step of a run on the axis. */
function place(step, run) {
  if (view.axis === "step") return step;
  const axis = page.runs[run].axes[view.axis];
  return axis ? interpolate(array(axis[0]), array(axis[1]), step) : NaN;
}

/** Return the steps of a run that the range shows. */
function shownSteps(run) {
  if (!view.range) return [0, Infinity];
  if (view.axis === "step") return view.range;
  const axis = page.runs[run].axes[view.axis];
  return axis ? view.range.map((at) => interpolate(array(axis[1]), array(axis[0]), at)) : [0, Infinity];
}

/** Return the ends of the axis over all shown curves. */
function extent() {
  let low = Infinity, high = -Infinity;
  for (const chart of charts)
    for (const line of chart.lines) {
      const x = view.hidden.has(line.run) ? null : places(line.x, line.run);
      if (x && x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    }
  if (low > high) return [0, 1];
  if (low > 0 && low < high / 10) low = 0;
  return low === high ? [low - 1, high + 1] : [low, high];
}

/** Show a part of the axis on all charts, within its ends; all of it without a part. */
function zoom(range) {
  const [low, high] = extent();
  if (range) {
    const width = Math.min(range[1] - range[0], high - low), start = Math.max(low, Math.min(range[0], high - width));
    range = width >= (high - low) * 0.999 || width <= 0 ? null : [start, start + width];
  }
  view.range = range;
  redraw();
}

let scheduled = false;
/** Draw all charts again in the next frame. */
function redraw() {
  for (const chart of charts) chart.stale = true;
  repaint();
}

/** Draw the crosshairs again, and each chart that is stale and on the screen. */
function repaint() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; paintAll(); });
}

function paintAll() {
  view.ends = view.range || extent();
  for (const chart of charts) chart.paint();
  document.dispatchEvent(new Event("shown"));
}

/** Draw all charts at once in light colours, before the page is printed; draw them as before afterwards. */
function printing(on) {
  document.documentElement.classList.toggle("printing", on);
  forgetColours();
  for (const chart of charts) { chart.stale = true; chart.printing = on; }
  if (on) paintAll(); else repaint();
}
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));

const colours = {};
/** Return a colour of the style sheet, of the present theme. */
function colour(name) {
  return (colours[name] ||= getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
}
function forgetColours() {
  for (const name of Object.keys(colours)) delete colours[name];
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColours(); redraw(); });

/** Make an element. Texts become text, never HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "colour") made.style.setProperty("--colour", `var(--${value})`);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Make the switch of a part of a step, in a legend. */
function partSwitch(part, ...children) {
  const made = element("button", { type: "button", class: "part" }, element("span", { class: "swatch part", colour: part }), element("span", {}, part), ...children);
  const show = () => made.setAttribute("aria-pressed", !view.without.has(part));
  made.addEventListener("click", () => { view.without[view.without.has(part) ? "delete" : "add"](part); redraw(); });
  document.addEventListener("shown", show);
  show();
  return made;
}

/** Return how an axis names a place. */
function formatPlace(at) {
  return view.axis === "seconds" ? format(at, "seconds") : `${view.axis} ${format(at, view.axis)}`;
}

/** Return the colour of a run's curves, the same on each chart. */
const runColour = (run) => `run-${run % 8}`;
