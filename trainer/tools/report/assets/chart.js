// A chart of curves over the axis: lines with bands, or stacked areas. Drawn once, and copied below the crosshair.

const FONT = '11.5px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif';
const FEW = 60; // points: fewer are dots, and are not smoothed
const EVENTS = { advice: "accent", crash: "bad", failure: "bad", restart: "warn", resume: "warn", skip: "warn", stop: "muted", start: "muted" };

class Chart {
  constructor(figure, spec) {
    Object.assign(this, { figure, kind: "plain", zero: false, stack: false, dots: false, raw: false, log: false }, spec);
    this.canvas = figure.querySelector("canvas");
    this.legend = figure.querySelector(".legend");
    this.cache = document.createElement("canvas");
    this.stale = true;
    this.visible = false;
    this.printing = false;
    this.button = figure.querySelector("button");
    this.button?.addEventListener("click", () => this.setLog(!this.log));
    new ResizeObserver(() => { this.stale = true; repaint(); }).observe(this.canvas);
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) repaint();
    }, { rootMargin: "200px" }).observe(this.canvas);
    this.makeLegend();
    listen(this);
  }

  setLog(on) {
    if (!this.button) return;
    this.log = on;
    this.button.setAttribute("aria-pressed", on);
    this.stale = true;
    repaint();
  }

  makeLegend() {
    this.values = this.lines.map((line) => {
      const value = element("b"), item = this.legend.appendChild(element("li", { title: line.label }));
      const swatch = element("span", { class: line.dash ? "swatch dash" : "swatch", colour: line.colour || runColour(line.run) });
      if (this.stack) item.append(partSwitch(line.label, value));
      else item.append(swatch, element("span", {}, line.label), value);
      return value;
    });
  }

  /** The curves that are shown, with their places on the axis. */
  get shown() {
    const lines = this.stack ? this.lines.filter((line) => !view.without.has(line.label)) : this.lines;
    return lines.filter((line) => !view.hidden.has(line.run) && places(line.x, line.run));
  }

  paint() {
    if (!this.visible && !this.printing) return;
    const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width) return;
    if (this.stale || this.cache.width !== Math.round(width * ratio)) {
      for (const canvas of [this.canvas, this.cache]) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); }
      const context = this.cache.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.draw(context, width, height);
      this.stale = false;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.cache, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawCursor(context);
    this.showValues();
  }

  draw(c, width, height) {
    this.prepare();
    const [low, high] = this.domain(), span = (this.ends = view.ends);
    const ticks = this.log ? logTicks(low, high) : niceTicks(low, high, height / 45).filter((t) => this.kind !== "count" || Number.isInteger(t));
    const labels = formatTicks(this.log ? ticks.map((t) => 10 ** t) : ticks, this.kind);
    if (this.log) ticks.forEach((t, i) => { labels[i] = formatTicks([10 ** t], this.kind)[0]; });
    c.clearRect(0, 0, width, height);
    c.font = FONT;
    const left = Math.max(52, ...labels.map((text) => c.measureText(text).width + 10));
    const plot = (this.plot = { left, top: 8, right: width - 10, bottom: height - 24 });
    this.x = (at) => plot.left + ((at - span[0]) / (span[1] - span[0])) * (plot.right - plot.left);
    this.y = (v) => plot.bottom - (((this.log ? Math.log10(v) : v) - low) / (high - low)) * (plot.bottom - plot.top);
    c.textBaseline = "middle";
    c.textAlign = "right";
    ticks.forEach((tick, i) => {
      const y = Math.round(plot.bottom - ((tick - low) / (high - low)) * (plot.bottom - plot.top)) + 0.5;
      c.strokeStyle = colour("grid"); c.lineWidth = 1;
      c.beginPath(); c.moveTo(plot.left, y); c.lineTo(plot.right, y); c.stroke();
      c.fillStyle = colour("muted");
      c.fillText(labels[i], plot.left - 6, y);
    });
    this.drawAxis(c, plot, span);
    c.save();
    c.beginPath(); c.rect(plot.left - 4, plot.top - 4, plot.right - plot.left + 8, plot.bottom - plot.top + 6); c.clip();
    if (this.stack) this.drawAreas(c); else this.drawLines(c);
    if (view.events) this.drawEvents(c, plot);
    c.restore();
    if (!this.drawn.length) {
      c.textAlign = "center"; c.fillStyle = colour("muted");
      c.fillText("nothing to show here", (plot.left + plot.right) / 2, (plot.top + plot.bottom) / 2);
    }
  }

  /** Find the points of each curve that the axis shows, and one more at each side. */
  prepare() {
    const [from, to] = view.ends;
    let base = null;
    this.drawn = this.shown.map((line) => {
      const x = places(line.x, line.run), raw = array(line.y);
      let first = nearest(x, from), last = nearest(x, to);
      if (first > 0) first--;
      if (last < x.length - 1) last++;
      let y = this.stack || this.raw || raw.length < FEW ? raw : smoothed(raw, view.smooth), floor = null;
      if (this.stack) {
        floor = base && base.length === raw.length ? base : new Float64Array(raw.length);
        y = Float64Array.from(raw, (v, i) => floor[i] + (Number.isFinite(v) && v > 0 ? v : 0));
        base = y;
      }
      return { line, x, raw, y, floor, first, last };
    });
  }

  /** Return the ends of the vertical axis; logarithms, if it is logarithmic. */
  domain() {
    let low = Infinity, high = -Infinity;
    for (const { line, raw, y, first, last } of this.drawn) {
      const sets = this.stack ? [y] : [raw, ...(line.low === undefined ? [] : [array(line.low), array(line.high)])];
      for (const values of sets)
        for (let i = first; i <= last; i++) {
          const v = values[i];
          if (!Number.isFinite(v) || (this.log && v <= 0)) continue;
          if (v < low) low = v;
          if (v > high) high = v;
        }
    }
    if (this.stack) high = Math.max(high, ...charts.filter((chart) => chart.stack).map((chart) => chart.peak()));
    if (low > high) return this.log ? [-1, 1] : [0, 1];
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    else if ((this.zero || this.stack) && low >= 0) low = 0;
    if (low === high) return this.log ? [low - 0.5, high + 0.5] : low ? [Math.min(0, low * 2), Math.max(0, low * 2)] : [0, 1];
    const room = (high - low) * 0.05;
    return [low === 0 && !this.log ? 0 : low - room, high + room];
  }

  /** Return the largest sum of the parts within the axis: areas of several runs have the same height. */
  peak() {
    const [from, to] = view.ends, lines = this.shown;
    let high = 0;
    if (!lines.length) return high;
    const x = places(lines[0].x, lines[0].run), all = lines.map((line) => array(line.y));
    for (let i = nearest(x, from); i <= nearest(x, to); i++) high = Math.max(high, all.reduce((sum, y) => sum + (y[i] > 0 ? y[i] : 0), 0));
    return high;
  }

  drawAxis(c, plot, span) {
    c.strokeStyle = colour("line");
    c.beginPath(); c.moveTo(plot.left, plot.bottom + 0.5); c.lineTo(plot.right, plot.bottom + 0.5); c.stroke();
    const ticks = niceTicks(span[0], span[1], (plot.right - plot.left) / 75), kind = view.axis;
    const labels = formatTicks(ticks, kind);
    c.fillStyle = colour("muted");
    ticks.forEach((tick, i) => {
      const x = this.x(tick), half = c.measureText(labels[i]).width / 2;
      c.textAlign = "center";
      c.fillText(labels[i], Math.max(plot.left - 6 + half, Math.min(x, plot.right + 8 - half)), plot.bottom + 14);
    });
  }

  drawLines(c) {
    c.lineJoin = "round";
    for (const { line, x, raw, y, first, last } of this.drawn) {
      const ink = colour(line.colour || runColour(line.run));
      c.fillStyle = c.strokeStyle = ink;
      if (line.low !== undefined) {
        this.fill(c, x, array(line.low), array(line.high), first, last, 0.14);
        c.globalAlpha = 0.4; c.lineWidth = 1; // so that a spike of one range is seen
        for (const edge of [line.low, line.high]) this.trace(c, x, array(edge), first, last);
        c.globalAlpha = 1;
      }
      c.setLineDash(line.dash ? [6, 4] : []);
      if (view.smooth && y !== raw) { c.globalAlpha = 0.3; c.lineWidth = 1; this.trace(c, x, raw, first, last); c.globalAlpha = 1; }
      c.lineWidth = 1.75;
      if (!this.dots) this.trace(c, x, y, first, last);
      c.setLineDash([]);
      if (this.dots || last - first < FEW)
        for (let i = first; i <= last; i++)
          if (this.fits(y[i])) { c.beginPath(); c.arc(this.x(x[i]), this.y(y[i]), 2.4, 0, 7); c.fill(); }
      if (line.bad !== undefined) this.markBad(c, x, array(line.bad), first, last);
    }
  }

  fits(v) { return Number.isFinite(v) && (!this.log || v > 0); }

  /** Draw a line with gaps at values that are not finite. */
  trace(c, x, y, first, last) {
    let open = false;
    c.beginPath();
    for (let i = first; i <= last; i++) {
      if (!this.fits(y[i])) { open = false; continue; }
      if (open) c.lineTo(this.x(x[i]), this.y(y[i])); else c.moveTo(this.x(x[i]), this.y(y[i]));
      open = true;
    }
    c.stroke();
  }

  fill(c, x, low, high, first, last, alpha) {
    c.globalAlpha = alpha;
    for (let i = first; i <= last; i++) {
      const start = i;
      while (i <= last && this.fits(high[i])) i++;
      if (i - start < 2) continue;
      c.beginPath();
      for (let j = start; j < i; j++) c.lineTo(this.x(x[j]), this.y(high[j]));
      for (let j = i - 1; j >= start; j--) c.lineTo(this.x(x[j]), this.fits(low[j]) ? this.y(low[j]) : this.plot.bottom);
      c.fill();
    }
    c.globalAlpha = 1;
  }

  /** Mark ranges with values that are not finite, at the bottom. */
  markBad(c, x, bad, first, last) {
    c.fillStyle = colour("bad");
    for (let i = first; i <= last; i++) {
      if (!bad[i]) continue;
      const at = this.x(x[i]), { bottom } = this.plot;
      c.beginPath(); c.moveTo(at - 4, bottom); c.lineTo(at + 4, bottom); c.lineTo(at, bottom - 7); c.fill();
    }
  }

  drawAreas(c) {
    for (const { line, x, y, floor, first, last } of this.drawn) {
      c.fillStyle = colour(line.colour);
      this.fill(c, x, floor, y, first, last, 0.92);
    }
    c.lineWidth = 1;
    c.strokeStyle = colour("panel");
    for (const { x, y, first, last } of this.drawn.slice(0, -1)) this.trace(c, x, y, first, last);
  }

  drawEvents(c, plot) {
    for (const run of this.runs) {
      if (view.hidden.has(run)) continue;
      for (const { step, event } of page.runs[run].events) {
        const ink = EVENTS[event], at = Math.round(this.x(place(step, run))) + 0.5;
        if (!(at >= plot.left && at <= plot.right)) continue;
        c.strokeStyle = c.fillStyle = colour(ink || "muted");
        if (ink && event !== "start" && event !== "stop") {
          c.setLineDash(ink === "bad" ? [] : [3, 3]);
          c.lineWidth = 1;
          c.beginPath(); c.moveTo(at, plot.top); c.lineTo(at, plot.bottom); c.stroke();
          c.setLineDash([]);
        } else { // checkpoints, validations: a short tick on the axis
          c.globalAlpha = 0.55;
          c.fillRect(at - 0.5, plot.bottom - (event === "checkpoint" ? 6 : 3), 1, event === "checkpoint" ? 6 : 3);
          c.globalAlpha = 1;
        }
      }
    }
  }

  get runs() { return [...new Set(this.lines.map((line) => line.run))]; }
}
