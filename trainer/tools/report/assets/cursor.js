// The crosshair of a chart: by pointer or keys, the same place on all charts; values in legends and next to the pointer.

Object.assign(Chart.prototype, {
  drawCursor(c) {
    const { plot } = this;
    if (this.selection) {
      c.fillStyle = colour("accent"); c.globalAlpha = 0.15;
      c.fillRect(this.selection[0], plot.top, this.selection[1] - this.selection[0], plot.bottom - plot.top);
      c.globalAlpha = 1;
    }
    if (view.cursor === null) return;
    const x = Math.round(this.x(view.cursor)) + 0.5;
    if (x < plot.left || x > plot.right) return;
    c.strokeStyle = colour("muted"); c.lineWidth = 1; c.globalAlpha = 0.8;
    c.beginPath(); c.moveTo(x, plot.top); c.lineTo(x, plot.bottom); c.stroke();
    c.globalAlpha = 1;
    if (this.stack) return;
    for (const { line, y, x: places, i } of this.atCursor()) {
      if (!this.fits(y[i])) continue;
      c.fillStyle = colour(line.colour || runColour(line.run)); c.strokeStyle = colour("panel"); c.lineWidth = 1.5;
      c.beginPath(); c.arc(this.x(places[i]), this.y(y[i]), 4, 0, 7); c.fill(); c.stroke();
    }
  },

  /** The drawn curves, each with the index of the point that is nearest to the crosshair. */
  atCursor() {
    if (view.cursor === null) return [];
    return this.drawn.filter(({ x }) => x.length).map((drawn) => ({ ...drawn, i: nearest(drawn.x, view.cursor) }));
  },

  /** Write the values at the crosshair into the legend; without a crosshair the last ones. */
  showValues() {
    const found = new Map(this.atCursor().map(({ line, raw, i }) => [line, raw[i]]));
    this.lines.forEach((line, n) => {
      const item = this.values[n].closest("li");
      item.hidden = view.hidden.has(line.run);
      const value = found.has(line) ? found.get(line) : line.last;
      this.values[n].textContent = value === null || value === undefined ? "" : format(value, this.kind);
    });
  },

  /** Fill the box next to the pointer. */
  showTip(px) {
    this.tip ||= this.figure.appendChild(element("div", { class: "tip", role: "status" }));
    const rows = this.atCursor().map(({ line, raw, i }) => {
      const swatch = element("span", { class: "swatch", colour: line.colour || runColour(line.run) });
      let text = format(raw[i], this.kind);
      if (line.low !== undefined && array(line.low)[i] !== array(line.high)[i])
        text += ` (${format(array(line.low)[i], this.kind)} to ${format(array(line.high)[i], this.kind)})`;
      return element("tr", {}, element("td", {}, swatch, " " + line.label), element("td", {}, text));
    });
    if (this.stack) {
      rows.reverse();
      const total = this.atCursor().reduce((sum, { raw, i }) => sum + (raw[i] > 0 ? raw[i] : 0), 0);
      rows.push(element("tr", {}, element("td", {}, "together"), element("td", {}, format(total, this.kind))));
    }
    this.tip.replaceChildren(element("b", {}, formatPlace(this.exactPlace())), element("table", {}, ...rows));
    for (const text of this.eventsNear(px, this.exactPlace())) this.tip.append(element("p", {}, text));
    const { offsetWidth: width } = this.tip, room = document.documentElement.clientWidth - this.figure.getBoundingClientRect().left;
    const x = px + 32 + width > room ? Math.max(4, px - width - 6) : px + 28;
    this.tip.style.transform = `translate(${x}px, 0)`;
    this.tip.style.left = "0";
    this.tip.style.top = this.canvas.offsetTop + 12 + "px";
    this.tip.hidden = false;
  },

  /** The place of the nearest point, which is a step of the run. */
  exactPlace() {
    const near = this.atCursor().map(({ x, i }) => x[i]);
    return near.length ? near[nearest([...near].sort((a, b) => a - b), view.cursor)] : view.cursor;
  },

  /** Return the events within some pixels, in a few words; the step only if it is not the crosshair's. */
  eventsNear(px, at) {
    if (!view.events) return [];
    const texts = [], when = (step, run) => (place(step, run) === at ? "" : ` at step ${format(step, "step")}`);
    for (const run of this.runs)
      for (const { step, event, text } of view.hidden.has(run) ? [] : page.runs[run].events)
        if (Math.abs(this.x(place(step, run)) - px) <= 5 && texts.length < 5)
          texts.push(`${event}${when(step, run)}${text ? ": " + text : ""}`);
    return texts;
  },

  hideTip() { if (this.tip) this.tip.hidden = true; },
});

/** Return the place on the axis below a position of the chart, in pixels. */
function placeAt(chart, px) {
  const { left, right } = chart.plot, [low, high] = view.ends;
  return low + ((Math.max(left, Math.min(right, px)) - left) / (right - left)) * (high - low);
}

function listen(chart) {
  const { canvas } = chart;
  let from = null;
  canvas.addEventListener("pointermove", (event) => {
    if (!chart.plot) return;
    const px = event.offsetX;
    view.cursor = placeAt(chart, px);
    if (from !== null) chart.selection = [Math.min(from, px), Math.max(from, px)];
    chart.showTip(px);
    repaint();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType === "touch") return;
    from = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  const release = () => {
    const chosen = chart.selection;
    from = chart.selection = null;
    if (chosen && chosen[1] - chosen[0] > 6) zoom(chosen.map((px) => placeAt(chart, px)));
    else repaint();
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  const leave = () => {
    if (from !== null) return;
    view.cursor = null;
    chart.hideTip();
    repaint();
  };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("dblclick", () => zoom(null));
  canvas.addEventListener("keydown", (event) => pressKey(chart, event));
}

/** Move the crosshair, zoom and switch by keys. */
function pressKey(chart, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !chart.plot) return;
  const [low, high] = view.ends, width = high - low, at = view.cursor ?? low;
  const move = (place) => { view.cursor = Math.max(low, Math.min(high, place)); };
  const next = (by) => {
    const line = chart.drawn.find(({ x }) => x.length);
    if (line) move(line.x[Math.max(line.first, Math.min(line.last, (view.cursor === null ? line.first - by : nearest(line.x, at)) + by))]);
  };
  const pan = (by) => view.range && zoom([low + by * width, high + by * width]);
  const keys = {
    ArrowLeft: () => next(event.shiftKey ? -10 : -1), ArrowRight: () => next(event.shiftKey ? 10 : 1),
    Home: () => move(low), End: () => move(high),
    PageUp: () => pan(-0.5), PageDown: () => pan(0.5),
    "+": () => zoom([at - (at - low) / 2, at + (high - at) / 2]),
    "-": () => zoom([at - (at - low) * 2, at + (high - at) * 2]),
    0: () => zoom(null), l: () => chart.setLog(!chart.log),
    Escape: () => { view.cursor = null; },
  };
  const act = keys[event.key === "=" ? "+" : event.key];
  if (!act) return;
  event.preventDefault();
  act();
  if (view.cursor === null) chart.hideTip();
  else { chart.x && chart.showTip(chart.x(view.cursor)); }
  repaint();
}
