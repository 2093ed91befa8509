// The form: sliders with boxes, choices and toggles, each bound to a field of the state.

import { by, count, make, size } from "./words.js";

const all = (selector) => [...document.querySelectorAll(selector)];

// Build what the HTML only names, and call `change(fields, {push})` for whatever a user changes.
export function build(names, change) {
  by("models").append(...names.models.map((one) => make("option", { value: one.model }, `${count(one.params)} parameters`)));
  by("gpu").append(
    ...names.gpus.map((one) => make("option", { value: one.gpu }, `${one.gpu} · ${Math.round(one.memory / 2 ** 30)} GiB`)),
    make("option", { value: "" }, "another size…"),
  );
  by("engine").append(...names.engines.map((name) => make("option", { value: name === "deepspeed" ? "" : name }, name)));
  by("optimizer").append(...names.optimizers.map((name) => make("option", { value: name === "adamw" ? "" : name }, name)));
  all("[data-slider]").forEach((place) => slider(place, change));
  all("[data-plan]").forEach((place) => choice(place, change));
  for (const input of all("[data-field]")) {
    const field = input.dataset.field;
    const read = () => {
      if (input.type === "checkbox") return input.checked || null;
      if (input.type === "number") return whole(input);
      return input.value.trim() || null;
    };
    const moment = input.tagName === "SELECT" || input.type === "checkbox" ? "change" : "input";
    // Another engine has other rows, so none of this one's stays chosen.
    const more = () => ({ ...(field === "gpu" && !input.value ? { vram: "24G" } : {}), ...(field === "engine" ? { show: null } : {}) });
    input.addEventListener(moment, () => change({ [field]: read(), ...more() }));
  }
  for (const input of all("[data-toggle]")) {
    input.addEventListener("change", () => {
      const on = /^\d+$/.test(input.dataset.on) ? Number(input.dataset.on) : input.dataset.on;
      const field = input.dataset.toggle;
      const base = field === "lora_rank" && !input.checked ? { quantize: null } : {}; // a base in 4 bits comes with adapters
      change({ [field]: input.checked ? on : null, ...base }, { push: true });
    });
  }
}

// The number in a box. What is none is asked as it stands, and refused by name, so that no other run is answered for it.
function whole(input) {
  if (input.validity.badInput) return "what is typed";
  if (input.value === "") return null;
  return Number.isSafeInteger(input.valueAsNumber) ? input.valueAsNumber : input.value;
}

function slider(place, change) {
  const { slider: field, label, unit } = place.dataset;
  const steps = place.dataset.steps.split(",").map(Number);
  const id = `f-${field}`;
  const range = make("input", { type: "range", min: 0, max: steps.length - 1, step: 1, "aria-label": label, id: `${id}-range` });
  const box = make("input", { type: "number", min: 1, id, "data-box": field });
  place.append(make("label", { for: id }, make("span", {}, label, unit ? make("small", {}, ` ${unit}`) : "")), box, range);
  range.addEventListener("input", () => {
    box.value = steps[range.value];
    spoken(range, box.value);
    change({ [field]: steps[range.value] });
  });
  box.addEventListener("input", () => change({ [field]: whole(box) }));
}

function spoken(range, value) {
  range.setAttribute("aria-valuetext", String(value));
}

function choice(place, change) {
  const { plan: key, label } = place.dataset;
  const set = make("div", { class: "set" });
  for (const value of place.dataset.options.split(",")) {
    const input = make("input", { type: "radio", name: key, value });
    input.addEventListener("change", () => change({ choose: { key, value } }, { push: true }));
    set.append(make("label", {}, input, value));
  }
  place.append(make("span", {}, label), set);
}

// The row of the table that has the chosen value and else is as near as can be to the one shown now.
export function pick(plans, now, key, value) {
  if (key === "stage" && value === "auto") return null;
  const wanted = key === "stage" ? Number(value) : value;
  const rows = plans.filter((plan) => plan[key] === wanted);
  const alike = (plan) => ["stage", "offload_optimizer", "offload_param"].filter((name) => plan[name] === now?.[name]).length;
  rows.sort((one, two) => alike(two) - alike(one));
  const best = rows[0];
  return best ? { stage: best.stage, offload_optimizer: best.offload_optimizer, offload_param: best.offload_param } : null;
}

// A select shows what the state says, else what a file says; a name that it does not offer, such as a GPU's other
// spelling, is added to it.
function select(input, value, effective) {
  const option = (name) => [...input.options].find((one) => one.value === name) ?? [...input.options].find((one) => one.text === name);
  const name = value ?? effective ?? "";
  const found = option(name) ?? make("option", { value: name }, name);
  if (!found.parentElement) input.append(found);
  input.value = found.value;
}

// Show the state in the form. What it leaves open shows the answer's own figures. The box in which somebody types is left
// alone, unless `typed` takes it, too.
export function sync(state, answer, names, { typed = false } = {}) {
  const typing = typed ? null : document.activeElement;
  const set = (input, value) => {
    if (input !== typing) input.value = value ?? "";
  };
  const report = answer?.report;
  const effective = { ...report?.workload, ...report?.cluster };
  const said = state.files?.length && report ? { ...effective, engine: report.plans[0]?.engine, model: report.model.name } : {};
  for (const input of all("[data-field]")) {
    const field = input.dataset.field;
    if (input.type === "checkbox") input.checked = Boolean(state[field] ?? said[field]);
    else if (input.tagName === "SELECT") select(input, state[field], field === "gpu" ? undefined : said[field]);
    else set(input, state[field] ?? (field === "model" ? said.model : undefined));
  }
  for (const input of all("[data-toggle]")) input.checked = Boolean(state[input.dataset.toggle] ?? (input.dataset.toggle === "lora_rank" ? effective.lora_rank : input.dataset.toggle === "quantize" && said.quantize));
  for (const place of all("[data-slider]")) {
    const field = place.dataset.slider;
    const value = state[field] ?? effective[field] ?? (report ? 1 : ""); // nothing is known before the first answer
    const [box, range] = [place.querySelector("[type=number]"), place.querySelector("[type=range]")];
    set(box, value);
    const steps = place.dataset.steps.split(",").map(Number);
    const near = steps.reduce((best, step, at) => (Math.abs(step - value) < Math.abs(steps[best] - value) ? at : best), 0);
    if (range !== typing) range.value = near;
    spoken(range, value);
  }
  by("program-row").hidden = !state.files?.length;
  by("rank").hidden = !(state.lora_rank ?? effective.lora_rank);
  by("vram-row").hidden = Boolean(state.gpu);
  const plan = report && answer.chosen !== null && answer.chosen !== undefined ? report.plans[answer.chosen] : null;
  for (const input of all("[data-plan] input")) {
    const key = input.name;
    const value = key === "stage" ? Number(input.value) : input.value;
    if (input.value === "auto") {
      input.checked = !state.show;
      continue;
    }
    input.checked = Boolean(plan && plan[key] === value && (key !== "stage" || state.show));
    input.disabled = Boolean(report && !report.plans.some((one) => one[key] === value));
  }
  const name = (state.model ?? "").toLowerCase();
  const known = names.models.find((one) => [one.model, ...one.also].some((other) => other.toLowerCase() === name));
  const model = report?.model;
  const hint = model ? `${count(model.params)} parameters${model.trainable === model.params ? "" : `, ${count(model.trainable)} trainable`}` : "";
  by("model-hint").textContent = hint || (known ? `${count(known.params)} parameters` : "");
}

// Characters of a file, at most: a configuration has a few thousand, a captured run some hundred thousand.
const MOST = 7_500_000;

// Files by drop, paste and choice; `add` gets their names and texts, `refuse` why there are none.
export function takeFiles(add, refuse) {
  const given = (files) => {
    const big = files.find((file) => (file.size ?? file.text.length) > MOST);
    if (big) refuse(`${big.name} is larger than 7.5 MB; give a configuration or a captured run, not data`);
    return !big;
  };
  const read = async (list) => {
    const files = [...list];
    if (!given(files)) return;
    try {
      add(await Promise.all(files.map(async (file) => ({ name: file.name, text: await file.text() }))));
    } catch {
      refuse(`${files.map((file) => file.name).join(", ")} cannot be read; choose files, not a folder`);
    }
  };
  const paste = (text) => {
    const file = { name: nameOf(text), text };
    if (text.trim() && given([file])) add([file]);
  };
  const drop = by("drop");
  addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) drop.classList.remove("over");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files.length) read(event.dataTransfer.files);
    else paste(event.dataTransfer.getData("text/plain"));
  });
  by("pick").addEventListener("change", (event) => {
    read(event.target.files).then(() => (event.target.value = ""));
  });
  // A paste is taken at once; what is typed, when the box is left.
  const box = by("paste");
  let length = 0;
  const take = () => {
    const text = box.value;
    box.value = "";
    length = 0;
    paste(text);
  };
  box.addEventListener("input", (event) => {
    const typed = Math.abs(box.value.length - length) <= 1 && !/^insertFrom/.test(event.inputType ?? "");
    length = box.value.length;
    if (!typed) take();
  });
  box.addEventListener("change", take);
}

// How a command line of a launch script begins, after variables that are set for it.
const COMMAND = /^\s*(\w+=\S*\s+)*(\S*\/)?(accelerate|deepspeed|torchrun|python3?|axolotl|llamafactory-cli|tune|swift|trl|litgpt|export)\s/m;

// The name that a pasted text would have: its ending says how it is read.
function nameOf(text) {
  const start = text.trimStart();
  if (/^(\{|\/[/*])/.test(start)) return /"model_type"\s*:/.test(start) ? "config.json" : "pasted.json";
  if (start.startsWith("#!") || COMMAND.test(text)) return "pasted.sh";
  return /^\s*\[[\w.-]+\]\s*$/m.test(text) ? "pasted.toml" : "pasted.yaml";
}

export function listFiles(files, read, remove) {
  const kinds = new Map((read ?? []).map((one) => [one.name, one.as]));
  by("files").replaceChildren(
    ...(files ?? []).map((file, at) =>
      make(
        "li",
        {},
        make("span", {}, `${file.name} (${kinds.get(file.name) === "model" ? "the model" : size(file.text.length).replace("0 MiB", `${count(file.text.length)} characters`)})`),
        make("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: () => remove(at) }, "Remove"),
      ),
    ),
  );
}
