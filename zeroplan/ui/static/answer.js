// An answer on the page: the verdict, what would lower it, every row, and the lines of the plan that is shown.

import { labelsOf, named } from "./labels.js";
import { by, count, fits, gib, make, most, needed, offload, size } from "./words.js";

const KIND = { Fits: "yes", "May fit": "unsure", "Does not fit": "no", "Nothing fits": "no", Unknown: "unsure", "No such plan": "no" };

// A message of the command line in the page's own words.
let labels = null;
export function worded(text) {
  labels ??= labelsOf(document);
  return named(text, labels);
}

export function gauge(plan, scale) {
  const [low, high] = plan.gpu.interval ?? [needed(plan), needed(plan)];
  const part = (bytes) => `${Math.min(100, (100 * bytes) / scale)}%`;
  const bar = make("div", { class: `gauge${plan.fits === false ? " over" : ""}`, "aria-hidden": "true" });
  const doubt = make("i", { class: "doubt" });
  const sure = make("i");
  doubt.style.width = part(high);
  sure.style.width = part(low);
  bar.append(doubt, sure);
  if (plan.gpu.usable) {
    const line = make("b");
    line.style.left = part(plan.gpu.usable);
    bar.append(line);
  }
  return bar;
}

export function verdict(answer) {
  const place = by("verdict");
  place.className = `card verdict ${KIND[answer.verdict] ?? ""}`;
  const plan = answer.chosen === null ? null : answer.report.plans[answer.chosen];
  place.replaceChildren(make("h2", {}, answer.verdict), make("p", {}, worded(answer.figures)));
  if (!plan) return;
  place.append(gauge(plan, Math.max(1.25 * (plan.gpu.usable ?? 0), 1.02 * most(plan))));
  for (const text of [answer.peak, answer.stages]) if (text) place.append(make("p", { class: "hint" }, text));
}

// Before the first answer: how far the simulation has come.
export function progress(done, of) {
  by("verdict").replaceChildren(
    make("h2", {}, "Simulating…"),
    make("p", {}, `The formulas' figures stand below; ${done} of ${of} rows have been simulated.`),
    make("progress", { value: done, max: of, "aria-label": "Rows simulated" }),
  );
}

// Says why there is no answer, and marks the field that is to blame: "--micro-batch" names micro_batch.
export function failed(error, again = null) {
  const blamed = (error?.where ?? "").replace(/^--/, "").replaceAll("-", "_").toLowerCase().replace(/^params$/, "model");
  for (const input of document.querySelectorAll("[data-field], [data-box]")) {
    if (blamed && (input.dataset.field ?? input.dataset.box) === blamed) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
  by("error").hidden = !error;
  const retry = again && make("button", { type: "button", onclick: again }, "Try again");
  by("error").replaceChildren(...(error ? [make("p", {}, make("strong", {}, "Not planned: "), worded(error.text)), ...(retry ? [retry] : [])] : []));
}

export function notes(answer) {
  const plan = answer.chosen === null ? null : answer.report.plans[answer.chosen];
  const setup = answer.report.setup;
  const texts = [
    ...(setup ? [setup.says] : []),
    ...answer.report.warnings,
    ...(plan?.warnings ?? []),
    ...(plan?.unmodelled ?? []).map((one) => `Not in the figures: ${one.key} (${one.effect}): ${one.says}`),
    ...(plan?.settle ? [`To settle whether it fits, ${plan.settle}.`] : []),
  ];
  by("notes").hidden = !texts.length;
  by("notes").replaceChildren(make("ul", {}, ...[...new Set(texts)].map((text) => make("li", {}, worded(text)))));
}

export function knobs(answer, turn) {
  by("knobs-card").hidden = answer.knobs !== null && !answer.knobs?.length;
  if (answer.knobs === null) return by("knobs").replaceChildren(make("p", { class: "hint" }, "Being simulated…"));
  by("knobs").replaceChildren(
    ...(answer.knobs ?? []).map((knob) =>
      make(
        "button",
        { type: "button", onclick: () => turn(knob) },
        knob.what,
        make("small", {}, `−${size(knob.saves)} → ${size(knob.total)}${knob.fits === true ? ", fits" : knob.fits === false ? ", does not fit" : ""}`),
      ),
    ),
  );
}

// Every plan as a row; until all are done, one at formula depth is still being simulated.
export function rows(plans, chosen, choose, { done = true } = {}) {
  const scale = Math.max(...plans.map((plan) => Math.min(most(plan), 1.5 * (plan.gpu.usable ?? Infinity))), ...plans.map((plan) => 1.1 * (plan.gpu.usable ?? 0)));
  const head = ["ZeRO", "offload", "GPU GiB", "", "host GiB", "disk GiB", "fits"];
  const hide = [4, 5];
  const disk = plans.some((plan) => plan.nvme.per_node);
  const shown = head.map((_, at) => at !== 5 || disk);
  const body = plans.map((plan, at) => {
    const open = plan.depth === "formula";
    const fit = open && !done ? { kind: "pending", text: "being simulated" } : fits(plan);
    const loop = plan.capture?.way === "loop";
    const name = loop ? "the script as it runs" : `ZeRO-${plan.stage}, offload ${offload(plan)}`;
    const cells = [
      make("td", {}, make("button", { type: "button", "aria-label": `Show ${name}`, onclick: () => choose(plan) }, loop ? "as it runs" : String(plan.stage))),
      make("td", {}, offload(plan)),
      make("td", { class: "figure" }, `${open ? "≥ " : ""}${gib(needed(plan))}`),
      make("td", {}, gauge(plan, scale)),
      make("td", { class: "figure narrow-hide" }, gib(plan.cpu.per_node || null)),
      make("td", { class: "figure narrow-hide" }, gib(plan.nvme.per_node || null)),
      make("td", { class: fit.kind }, fit.text),
    ].filter((_, column) => shown[column]);
    const row = make("tr", { class: "pick", "aria-current": at === chosen ? "true" : null }, ...cells);
    row.addEventListener("click", (event) => {
      if (event.target.tagName !== "BUTTON") choose(plan);
    });
    return row;
  });
  const cells = head.map((text, at) => make(text ? "th" : "td", { scope: text ? "col" : null, class: [at === 2 || at === 4 || at === 5 ? "figure" : "", hide.includes(at) ? "narrow-hide" : ""].join(" ").trim() || null }, text));
  by("rows").replaceChildren(make("thead", {}, make("tr", {}, ...cells.filter((_, at) => shown[at]))), make("tbody", {}, ...body));
}

export function lines(plan) {
  const found = [...(plan?.lines ?? [])].sort((one, two) => two.bytes - one.bytes);
  by("lines").replaceChildren(
    make("thead", {}, make("tr", {}, ...["buffer", "place", "GiB", "how"].map((text, at) => make("th", { scope: "col", class: at === 2 ? "figure" : null }, text)))),
    make("tbody", {}, ...found.map((line) => make("tr", {}, make("td", {}, line.buffer), make("td", {}, line.place), make("td", { class: "figure" }, gib(line.bytes, 2)), make("td", {}, make("code", {}, line.formula))))),
  );
}

export function legend(timeline, at, where) {
  const place = by("legend");
  if (!timeline) return place.replaceChildren();
  const point = at ?? timeline.peak;
  const item = (name, bytes, color) => make("li", {}, color ? swatch(color) : "", `${name} `, make("b", {}, size(bytes)));
  const least = 2 ** 20;
  // A layer that is not there at this point is in the picture all the same.
  const elsewhere = (layer, most) => make("li", {}, swatch(layer.color), `${layer.name} `, make("b", {}, "0"), ` (elsewhere up to ${size(most)})`);
  const layers = timeline.layers.map((layer) => [layer.bytes[point], Math.max(...layer.bytes), layer]).filter(([, most]) => most >= least);
  place.replaceChildren(
    make("li", {}, make("b", {}, at === null ? "At the peak:" : where)),
    ...layers.sort(([one, ones], [two, twos]) => two - one || twos - ones).map(([bytes, most, layer]) => (bytes >= least ? item(layer.name, bytes, layer.color) : elsewhere(layer, most))),
    item("allocated", timeline.allocated[point]),
    item("reserved, the line,", timeline.reserved[point]),
  );
}

function swatch(color) {
  return make("i", { class: "chip", style: `--c:${color}`, "aria-hidden": "true" });
}

const COMPARED = [
  ["total on the GPU", (plan) => plan.gpu.total],
  ["at most", (plan) => plan.gpu.interval?.[1]],
  ["model states", (plan) => plan.gpu.model_states],
  ["activations", (plan) => plan.gpu.activations],
  ["peak allocated", (plan) => plan.gpu.peak_allocated],
  ["peak reserved", (plan) => plan.gpu.peak_reserved],
  ["live after a step", (plan) => plan.gpu.live_after_step],
  ["host memory a node", (plan) => plan.cpu.per_node],
  ["disk a node", (plan) => plan.nvme.per_node],
];

// The shown plan's figures beside those of the held ones, each with what it has more or less.
export function difference(answer, held) {
  const place = by("difference");
  const shown = (of) => of.report.plans[of.chosen];
  const plans = [answer, ...held].map(shown).filter(Boolean);
  place.hidden = plans.length < 2 || !shown(answer);
  if (place.hidden) return;
  const figures = COMPARED.map(([name, of]) => [name, ...plans.map((plan) => of(plan) ?? null)]).filter(([, ...values]) => values.some(Boolean));
  const less = (now, other) => make("small", { class: other < now ? "less" : "more-than" }, ` ${other > now ? "+" : "−"}${gib(Math.abs(other - now))}`);
  const cell = (now, other) => make("td", { class: "figure" }, gib(other), now === null || other === null || now === other ? null : less(now, other));
  place.replaceChildren(
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...["GiB", "now", ...held.map((_, at) => `held ${at + 1}`)].map((text, at) => make("th", { scope: "col", class: at ? "figure" : null }, text)))),
      make("tbody", {}, ...figures.map(([name, now, ...others]) => make("tr", {}, make("td", {}, name), cell(now, now), ...others.map((other) => cell(now, other))))),
    ),
  );
}

// What a search found; `apply` shows one of them, and is null where the question's files say what no field does.
export function found(answer, apply) {
  const place = by("found");
  const mark = { Best: "yes", "Least memory": "yes", "Nothing fits": "no", Unknown: "unsure", "May fit": "unsure" }[answer.verdict] ?? "";
  const head = make("p", { class: mark }, make("strong", {}, `${answer.verdict}: `), worded(answer.figures));
  const rows = answer.report.ranking.map((one, at) => {
    const choice = answer.choices[at];
    return make(
      "tr",
      { class: "pick" },
      make("td", {}, apply ? make("button", { type: "button", onclick: () => apply(choice) }, choice.label) : choice.label),
      make("td", { class: "figure" }, count(Math.round(one.tokens_per_second))),
      make("td", { class: "figure" }, gib(one.plan.gpu.interval?.[1] ?? one.plan.gpu.total)),
      make("td", { class: fits(one.plan).kind }, fits(one.plan).text),
    );
  });
  const table = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "What the search found" }, make("table", {}, make("thead", {}, make("tr", {}, ...["show", "tokens/s", "GPU at most", "fits"].map((text, at) => make("th", { scope: "col", class: at === 1 || at === 2 ? "figure" : null }, text)))), make("tbody", {}, ...rows)));
  const said = [...(answer.report.ranking[0]?.reasons ?? []), ...answer.report.changes.map((one) => `It would fit with ${one.what}.`), ...answer.report.warnings];
  place.replaceChildren(head, ...(rows.length ? [table] : []), make("ul", {}, ...said.map((text) => make("li", {}, worded(text)))), make("p", { class: "hint" }, make("code", {}, answer.command)));
}
