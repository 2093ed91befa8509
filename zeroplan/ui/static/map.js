// The map: what the shown plan needs at each micro batch and sequence, or number of GPUs, and where the card's line runs.

import { by, gib, make } from "./words.js";

const BATCHES = [1, 2, 4, 8, 16, 32, 64];
const ROWS = { seq_len: [512, 1024, 2048, 4096, 8192, 16384, 32768], ranks: [1, 2, 4, 8, 16, 32, 64] };
const KIND = { fits: "yes", "does not fit": "no", "may fit": "unsure", unknown: "unsure" };

const withNow = (values, now) => [...new Set([...values, now])].sort((one, two) => one - two);

// The machine of so many GPUs: nodes of `size` once one node is full; null where they fill no whole nodes.
export function machine(ranks, size) {
  if (ranks <= size) return { gpus: ranks, nodes: 1 };
  return ranks % size ? null : { gpus: size, nodes: ranks / size };
}

export class CardMap {
  #axis = "seq_len";
  #key = "";
  #rows = []; // {head, fields, cells}
  #batches = [];
  #run = 0;

  constructor(ask, apply) {
    this.ask = ask;
    this.apply = apply;
  }

  // What the map is about, but for what its axes say.
  static key(state, plan, axis) {
    const { micro_batch: _, show: __, ...rest } = state;
    for (const name of axis === "seq_len" ? ["seq_len"] : ["gpus", "nodes"]) delete rest[name];
    return JSON.stringify([axis, rest, plan.stage, plan.offload_optimizer, plan.offload_param]);
  }

  // Ask for each row by itself, so that other questions come between.
  async draw(state, answer, axis) {
    const plan = answer.report.plans[answer.chosen];
    const { micro_batch: batch, seq_len: length } = answer.report.workload;
    const { gpus, nodes } = answer.report.cluster;
    const run = ++this.#run;
    this.#axis = axis;
    this.#key = CardMap.key(state, plan, axis);
    this.#batches = withNow(BATCHES, batch);
    const heads = withNow(ROWS[axis], axis === "seq_len" ? length : gpus * nodes);
    this.#rows = heads
      .map((head) => ({ head, fields: axis === "seq_len" ? { seq_len: head } : machine(head, gpus), cells: null }))
      .filter((row) => row.fields);
    const show = { stage: plan.stage, offload_optimizer: plan.offload_optimizer, offload_param: plan.offload_param };
    this.show(answer);
    for (const row of this.#rows) {
      const got = await this.ask({ ...state, ...row.fields, micro_batch: undefined }, { verb: "map", batches: this.#batches, show });
      if (run !== this.#run) return;
      row.cells = got.error ? [] : got.cells;
      row.error = got.error;
      this.show(answer);
    }
  }

  // Whether the map is of another question by now; then it goes.
  settle(state, answer) {
    const plan = answer?.report.plans[answer.chosen];
    if (!this.#rows.length) return;
    if (plan && CardMap.key(state, plan, this.#axis) === this.#key) return this.show(answer);
    this.#run += 1;
    this.#rows = [];
    by("map").replaceChildren(make("p", { class: "hint" }, "What was drawn was for another question."));
  }

  show(answer) {
    const { micro_batch: batch, seq_len: length } = answer.report.workload;
    const { gpus, nodes } = answer.report.cluster;
    const now = this.#axis === "seq_len" ? length : gpus * nodes;
    const what = this.#axis === "seq_len" ? "sequence" : "GPUs";
    const kind = (row, at) => KIND[row?.cells?.[at]?.verdict];
    const body = this.#rows.map((row, line) => {
      const cells = this.#batches.map((count, at) => {
        const cell = row.cells?.[at];
        if (!cell) return make("td", { class: "pending" }, row.cells ? "–" : "…");
        const edge = (other) => other && kind(row, at) !== other && (kind(row, at) === "yes" || other === "yes");
        const here = count === batch && row.head === now;
        const classes = [kind(row, at), edge(kind(row, at + 1)) && "edge-right", edge(kind(this.#rows[line + 1], at)) && "edge-below", here && "here"];
        const size = `${cell.depth === "formula" ? "≥ " : ""}${gib(cell.bytes)}`;
        const says = `${what} ${row.head}, micro batch ${count}: ${size} GiB, ${cell.verdict}`;
        return make("td", { class: classes.filter(Boolean).join(" ") }, make("button", { type: "button", "aria-label": says, title: says, onclick: () => this.apply({ ...row.fields, micro_batch: count }) }, size));
      });
      return make("tr", {}, make("th", { scope: "row" }, String(row.head)), ...cells);
    });
    const usable = answer.report.plans[answer.chosen]?.gpu.usable;
    const refused = this.#rows.find((row) => row.error)?.error.text;
    const line = usable ? ` The thick edge is where ${gib(usable)} GiB of the card, the host and the disk end.` : " No card is given, so nothing says what fits.";
    by("map").replaceChildren(
      make("p", { class: "hint" }, `${answer.name ?? ""}: GiB of one GPU at most, by ${what} (down) and micro batch (across).${line} A cell shows its plan.`),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The map" }, make("table", { class: "map" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, what), ...this.#batches.map((count) => make("th", { scope: "col" }, String(count))))), make("tbody", {}, ...body))),
      ...(refused ? [make("p", { class: "no" }, refused)] : []),
    );
  }
}
