// Plans that are held beside the one that is shown: their charts under one scale, and what differs.

import { Chart } from "./chart.js";
import { by, make } from "./words.js";

export class Held {
  #answers = new Map(); // of each held state, by its text
  #charts = []; // one for each held plan, made when first needed

  constructor(onCursor, back, release) {
    this.onCursor = onCursor;
    this.back = back;
    this.release = release;
  }

  keep(state, answer) {
    this.#answers.set(JSON.stringify(state), answer);
  }

  of(state) {
    return this.#answers.get(JSON.stringify(state));
  }

  // Draw each held plan that has an answer with `draw(chart, answer)`.
  show(states, title, draw) {
    while (this.#charts.length < states.length) this.#charts.push(this.#place(this.#charts.length));
    by("plans").classList.toggle("several", states.length > 0);
    this.#charts.forEach((one, at) => {
      const state = states[at];
      const answer = state && this.of(state);
      one.figure.hidden = !answer;
      one.state = state;
      one.answer = answer;
      if (!answer) return;
      one.name.textContent = `Held ${at + 1}: ${title(answer)}`;
      for (const button of one.buttons) button.setAttribute("aria-label", `${button.textContent}: held plan ${at + 1}`);
      draw(one.chart, answer);
    });
  }

  #place(at) {
    const place = make("div", { class: "chart" });
    const name = make("figcaption", {});
    const buttons = [make("button", { type: "button", onclick: () => this.back(one.state) }, "Back to it"), make("button", { type: "button", onclick: () => this.release(one.state) }, "Let it go")];
    const figure = make("figure", { class: "held" }, name, place, make("div", { class: "buttons" }, ...buttons));
    by("plans").append(figure);
    const chart = new Chart(place, (index) => this.onCursor(one.answer, index, at));
    const one = { figure, name, buttons, chart, state: null, answer: null };
    return one;
  }
}
