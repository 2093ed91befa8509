// The stacked timeline of a plan, drawn by uPlot: layers of allocated bytes, the reserved bytes, and the card's line.

import uPlot from "./vendor/uPlot.esm.js";
import { GIB, make, shade, size } from "./words.js";

const PHASES = { model: "model", init: "initialise", fwd: "forward", bwd: "backward", eval: "evaluation" };

function phase(mark) {
  return PHASES[mark] ?? (mark.startsWith("step") ? "step" : mark);
}

function ink(element, name) {
  const probe = make("i", { style: `color: var(--${name})` });
  element.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

// The upper edge: the highest value, and the card's line unless it is far above.
export function ceiling(timeline, usable) {
  const highest = Math.max(...timeline.reserved, ...timeline.allocated, 1);
  return Math.max(highest, usable && usable < 1.6 * highest ? usable : 0) * 1.06;
}

export class Chart {
  #place;
  #plot = null;
  #observer;
  #timeline = null;

  constructor(place, onCursor) {
    this.#place = place;
    this.onCursor = onCursor;
    this.#observer = new ResizeObserver(() => {
      if (this.#plot && place.clientWidth) this.#plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    });
    this.#observer.observe(place);
    place.addEventListener("keydown", (event) => this.#keys(event));
    place.addEventListener("blur", () => {
      this.#speak(this.#timeline?.peak ?? 0);
      this.onCursor(null);
    });
  }

  // Draws a timeline under `top` bytes; without one the text says why there is none.
  show(timeline, { usable, top, label, none }) {
    this.#plot?.destroy();
    this.#plot = null;
    this.#timeline = timeline;
    this.#place.replaceChildren();
    this.#place.setAttribute("aria-label", label);
    this.#place.setAttribute("role", timeline ? "slider" : "img"); // its cursor is moved as a slider's
    this.#place.tabIndex = timeline ? 0 : -1;
    if (!timeline) {
      this.#place.append(make("p", { class: "none" }, none));
      return;
    }
    this.#place.setAttribute("aria-valuemin", 0);
    this.#place.setAttribute("aria-valuemax", timeline.positions.length - 1);
    this.#speak(timeline.peak);
    const colors = { ink: ink(this.#place, "ink"), faint: ink(this.#place, "faint"), line: ink(this.#place, "line"), bad: ink(this.#place, "bad"), paper: ink(this.#place, "paper") };
    const sums = timeline.layers.reduce((found, layer) => {
      const below = found.at(-1);
      return [...found, layer.bytes.map((bytes, at) => bytes + (below ? below[at] : 0))];
    }, []);
    // The highest sum is drawn first and filled to the ground, the lower ones over it.
    const order = timeline.layers.map((_, at) => at).reverse();
    const series = order.map((at) => ({ fill: shade(timeline.layers[at].color), width: 0, points: { show: false } }));
    const options = {
      width: this.#place.clientWidth || 600,
      height: this.#place.clientHeight || 320,
      padding: [18, 8, 8, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { show: false } },
      scales: { x: { time: false, range: [0, 1] }, y: { range: [0, top] } },
      axes: [
        { show: false },
        {
          stroke: colors.faint,
          grid: { stroke: colors.line, width: 1 },
          ticks: { show: false },
          size: 58,
          values: (_, splits) => splits.map((value) => (!value ? "0" : top < GIB ? `${+(value / 2 ** 20).toPrecision(3)} MiB` : `${+(value / GIB).toFixed(2)} GiB`)),
          splits: () => ticks(top),
        },
      ],
      series: [{}, ...series, { stroke: colors.ink, width: 1.3, points: { show: false } }],
      hooks: {
        draw: [(plot) => overlay(plot, timeline, usable, top, colors)],
        setCursor: [(plot) => this.onCursor(plot.cursor.idx ?? null)],
      },
    };
    this.#plot = new uPlot(options, [timeline.positions, ...order.map((at) => sums[at]), timeline.reserved], this.#place);
  }

  // Tells a screen reader where the cursor is, and what is allocated there.
  #speak(at) {
    const timeline = this.#timeline;
    if (!timeline) return;
    const mark = timeline.marks.find(([end]) => end >= timeline.positions[at]);
    const largest = timeline.layers.reduce((best, layer) => (layer.bytes[at] > best.bytes[at] ? layer : best));
    const inPhase = mark ? `${phase(mark[1])}: ` : "";
    this.#place.setAttribute("aria-valuenow", at);
    this.#place.setAttribute("aria-valuetext", `${inPhase}${size(timeline.allocated[at])} allocated, most of it ${largest.name} ${size(largest.bytes[at])}`);
  }

  #keys(event) {
    if (!this.#plot || !this.#timeline || !["ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const last = this.#timeline.positions.length - 1;
    const now = this.#plot.cursor.idx ?? this.#timeline.peak;
    const page = Math.ceil(last / 20);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: 0, End: last }[event.key];
    const at = Math.min(Math.max(to, 0), last);
    this.#speak(at);
    this.#plot.setCursor({ left: this.#plot.valToPos(this.#timeline.positions[at], "x"), top: 10 });
  }
}

function ticks(top) {
  const rough = top / GIB / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  return Array.from({ length: Math.floor(top / GIB / step) + 1 }, (_, at) => at * step * GIB);
}

function overlay(plot, timeline, usable, top, colors) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const x = (value) => plot.valToPos(value, "x", true);
  const y = (value) => plot.valToPos(value, "y", true);
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.lineJoin = "round";
  ctx.textAlign = "center";
  let start = 0;
  for (const [end, mark] of timeline.marks) {
    ctx.strokeStyle = colors.line;
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x(end), bbox.top);
    ctx.lineTo(x(end), bbox.top + bbox.height);
    ctx.stroke();
    const name = [phase(mark), mark].find((one) => ctx.measureText(one).width < x(end) - x(start) - 4 * ratio);
    if (name) {
      ctx.fillStyle = colors.faint;
      ctx.fillText(name, (x(start) + x(end)) / 2, bbox.top - 6 * ratio);
    }
    start = end;
  }
  if (usable && usable < top) {
    // Over a rim of the page's own colour, since it may lie on layers of any.
    ctx.textAlign = "right";
    const text = `the card: ${size(usable)}`;
    for (const [color, width, dash] of [[colors.paper, 4.5, []], [colors.bad, 1.6, [7, 4]]]) {
      ctx.strokeStyle = color;
      ctx.lineWidth = width * ratio;
      ctx.setLineDash(dash.map((length) => length * ratio));
      ctx.beginPath();
      ctx.moveTo(bbox.left, y(usable));
      ctx.lineTo(bbox.left + bbox.width, y(usable));
      ctx.stroke();
      if (color === colors.paper) ctx.strokeText(text, bbox.left + bbox.width - 4 * ratio, y(usable) - 6 * ratio);
    }
    ctx.fillStyle = colors.bad;
    ctx.fillText(text, bbox.left + bbox.width - 4 * ratio, y(usable) - 6 * ratio);
  }
  ctx.restore();
}
