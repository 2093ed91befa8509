// The stacked timeline of a plan: layers of allocated bytes, the reserved bytes, and the card's line, drawn as in reports.

import { make, size } from "./words.js";

const plot = globalThis.zeroplanPlot;

// The upper edge: the highest value, and the card's line unless it is far above.
export function ceiling(timeline, usable) {
  return plot.scale({ ...timeline, usable }, 0, 0).top;
}

export class Chart {
  #place;
  #data = null;
  #at = null;

  constructor(place, onCursor) {
    this.#place = place;
    this.onCursor = onCursor;
    place.classList.add("plot");
    new ResizeObserver(() => this.#draw()).observe(place);
    const to = (at) => {
      this.#at = at;
      plot.cursor(place, this.#data, at);
      this.#speak(at ?? this.#data.peak);
      this.onCursor(at);
    };
    place.addEventListener("pointermove", (event) => this.#data && to(plot.pointed(place, this.#data, event)));
    for (const left of ["pointerleave", "blur"]) place.addEventListener(left, () => this.#data && to(null));
    place.addEventListener("keydown", (event) => {
      const at = this.#data && plot.moved(this.#data, this.#at ?? this.#data.peak, event.key);
      if (at === null) return;
      event.preventDefault();
      to(at);
    });
  }

  // Draws a timeline under `top` bytes; without one the text says why there is none.
  show(timeline, { usable, top, label, none }) {
    const place = this.#place;
    this.#data = timeline ? { ...timeline, usable, top } : null;
    this.#at = null;
    place.replaceChildren();
    place.setAttribute("aria-label", label);
    place.setAttribute("role", timeline ? "slider" : "img"); // its cursor is moved as a slider's
    place.tabIndex = timeline ? 0 : -1;
    if (!timeline) return place.append(make("p", { class: "none" }, none));
    place.setAttribute("aria-valuemin", 0);
    place.setAttribute("aria-valuemax", timeline.positions.length - 1);
    this.#speak(timeline.peak);
    this.#draw();
  }

  #draw() {
    if (this.#data && this.#place.clientWidth) plot.draw(this.#place, this.#data);
  }

  // Tells a screen reader where the cursor is, and what is allocated there.
  #speak(at) {
    const { marks, positions, layers, allocated } = this.#data;
    const mark = marks.find(([end]) => end >= positions[at]);
    const largest = layers.reduce((best, layer) => (layer.bytes[at] > best.bytes[at] ? layer : best));
    this.#place.setAttribute("aria-valuenow", at);
    this.#place.setAttribute("aria-valuetext", `${mark ? `${mark[1]}: ` : ""}${size(allocated[at])} allocated, most of it ${largest.name} ${size(largest.bytes[at])}`);
  }
}
