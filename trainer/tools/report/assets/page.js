// Starts the charts, the bars of ranks and the controls.

/** Draw the mean step of each rank as a bar of its parts, over the steps that the axis shows. */
class Ranks {
  constructor(figure, run) {
    Object.assign(this, { figure, run, rows: figure.querySelector(".ranks"), said: figure.querySelector("small"), ...page.runs[run].ranks });
    this.legend();
    Ranks.all.push(this);
    document.addEventListener("shown", () => this.show());
  }

  /** Return the longest bar of all shown runs, so that bars of several runs compare. */
  static longest() {
    const shown = Ranks.all.filter((one) => !view.hidden.has(one.run));
    return Math.max(1e-12, ...shown.flatMap((one) => one.means()[0].map((parts) => parts.reduce((a, b) => a + b, 0))));
  }

  legend() {
    const list = this.figure.querySelector(".legend");
    for (const part of this.parts) list.append(element("li", {}, partSwitch(part)));
  }

  /** Sum the spans of steps within the range; all of them, if none is. */
  means() {
    const [low, high] = shownSteps(this.run), { ranks, parts } = this, width = parts.length;
    const last = array(this.last), steps = array(this.steps), seconds = array(this.seconds);
    let chosen = [...last.keys()].filter((i) => last[i] >= low && (i ? last[i - 1] : 0) <= high);
    if (!chosen.length) chosen = [...last.keys()];
    const means = ranks.map((_, r) => {
      const sum = new Float64Array(width);
      let count = 0;
      for (const i of chosen) {
        count += steps[i * ranks.length + r];
        for (let p = 0; p < width; p++) sum[p] += seconds[(i * ranks.length + r) * width + p];
      }
      return Array.from(sum, (s, p) => (view.without.has(parts[p]) ? 0 : s / Math.max(count, 1)));
    });
    return [means, chosen[0] ? last[chosen[0] - 1] + 1 : 1, last[chosen[chosen.length - 1]]];
  }

  show() {
    const key = [shownSteps(this.run), ...view.hidden, "without", ...view.without].join();
    if (key === this.key) return;
    this.key = key;
    this.figure.hidden = view.hidden.has(this.run);
    const [means, first, last] = this.means(), totals = means.map((parts) => parts.reduce((a, b) => a + b, 0));
    const most = Ranks.longest(), rows = [];
    const [factor, unit] = scaleOf(most, "seconds"), shown = totals.map((total) => (total * factor).toFixed(2) + THIN + unit);
    means.forEach((parts, r) => {
      const texts = this.parts.map((part, p) => `${part} ${format(parts[p], "seconds", 3)}`);
      const track = element("div", { class: "track", role: "img", "aria-label": `rank ${this.ranks[r]}: ${texts.join(", ")}` });
      parts.forEach((seconds, p) => {
        if (seconds <= 0) return;
        const share = ((100 * seconds) / totals[r]).toFixed(1);
        const bar = element("span", { colour: this.parts[p], title: `rank ${this.ranks[r]}, ${texts[p]} (${share}%)` });
        bar.style.width = `${(100 * seconds) / most}%`;
        track.append(bar);
      });
      rows.push(element("span", {}, `rank ${this.ranks[r]}`), track, element("b", {}, shown[r]));
    });
    const ticks = niceTicks(0, most, 5), labels = formatTicks(ticks, "seconds"), axis = element("div", { class: "axis" });
    ticks.forEach((tick, i) => axis.appendChild(element("span", {}, labels[i])).style.left = `${(100 * tick) / most}%`);
    this.rows.replaceChildren(...rows, element("span"), axis, element("span"));
    const left = this.parts.filter((part) => view.without.has(part)).join(", ");
    this.said.textContent = `mean of steps ${format(first, "step")} to ${format(last, "step")}${left && ", without " + left}`;
  }
}

Ranks.all = [];

/** Filter the rows of a table by a word. */
function filterRows(input) {
  const rows = [...document.getElementById(input.getAttribute("aria-controls")).querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const word = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(word);
  });
}

function start() {
  const get = (id) => document.getElementById(id);
  for (const figure of document.querySelectorAll("figure[data-chart]")) charts.push(new Chart(figure, page.charts[figure.dataset.chart]));
  for (const figure of document.querySelectorAll("figure[data-ranks]")) new Ranks(figure, Number(figure.dataset.ranks));
  get("axis").addEventListener("change", (event) => { view.axis = event.target.value; view.range = view.cursor = null; redraw(); });
  get("smooth").addEventListener("input", (event) => {
    view.smooth = event.target.value / 100;
    get("smoothed").value = view.smooth.toFixed(2);
    redraw();
  });
  get("log").addEventListener("change", (event) => charts.forEach((chart) => chart.setLog(event.target.checked)));
  get("events-shown").addEventListener("change", (event) => { view.events = event.target.checked; redraw(); });
  get("all").addEventListener("click", () => zoom(null));
  document.addEventListener("shown", () => { get("all").disabled = !view.range; });
  for (const button of document.querySelectorAll("button[data-run]"))
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run), hide = button.getAttribute("aria-pressed") === "true";
      view.hidden[hide ? "add" : "delete"](run);
      button.setAttribute("aria-pressed", !hide);
      redraw();
    });
  document.querySelectorAll("input[type=search]").forEach(filterRows);
  redraw();
}

start();
