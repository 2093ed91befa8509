// The page: keeps the state, asks one question at a time, and shows the last answer.

import * as view from "./answer.js";
import { backend } from "./backend.js";
import { Chart, ceiling } from "./chart.js";
import { Held } from "./held.js";
import { build, listFiles, pick, sync, takeFiles } from "./controls.js";
import { CardMap } from "./map.js";
import { FIRST, MOST_HELD, changed, fromHash, question, toHash } from "./state.js";
import { by, copy, dark, make, save, toast } from "./words.js";

// Milliseconds between the last change and the question: a slider that is dragged asks once it rests.
const REST = 140;
// Milliseconds after which a question whose answer nobody waits for any more is ended; a shorter one is let finish.
const LONG = 3000;

const planner = backend();
let names = null;
// A history entry keeps the whole state, files too long for a link included; a link has what stands in it.
let { state, held } = history.state?.state ? history.state : fromHash(location.hash); // held: the states of held plans
let answer = null; // the last one without an error
let asking = null; // ends the question that is being answered
let since = 0;
let others = {}; // model and machine before files said them
let sought = ""; // what the search was asked whose configurations are shown
let again = false;
let timer = 0;
let reading = 0; // files that are looked into before they are asked about

// The legend is of the plan under the cursor, and without one of the plan that is shown.
const chart = new Chart(by("chart"), (at) => view.legend(answer?.timeline, at, "Here:"));
const beside = new Held(
  (of, at, place) => (at === null ? view.legend(answer?.timeline, null) : view.legend(of?.timeline, at, `In held plan ${place + 1}, here:`)),
  (of) => go({ ...of }, true),
  (of) => hold(held.filter((one) => one !== of)),
);
const fitted = new CardMap(
  (of, more) => planner.ask(question(of, more)).catch((fault) => ({ error: { text: fault.message } })),
  (fields) => {
    const plan = answer.report.plans[answer.chosen];
    go({ ...state, ...fields, show: { stage: plan.stage, offload_optimizer: plan.offload_optimizer, offload_param: plan.offload_param } }, true);
  },
);

function change(fields, { push = false } = {}) {
  const { choose, ...plain } = fields;
  if (choose) {
    const now = state.show ?? answer?.report.plans[answer.chosen];
    plain.show = pick(answer?.report.plans ?? [], now, choose.key, choose.value);
  }
  go({ ...state, ...plain }, push);
}

function go(next, push, { applied = false } = {}) {
  state = Object.fromEntries(Object.entries(next).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  if (push) remember(true);
  if (applied) sought = searchKey();
  else if (sought && sought !== searchKey()) forget();
  sync(state, answer, names);
  listFiles(state.files, answer?.read, removeFile); // now, since a file that cannot be read never becomes an answer
  clearTimeout(timer);
  timer = setTimeout(() => {
    timer = 0;
    if (!push) remember();
    ask();
  }, push ? 0 : REST);
  busy();
}

// Says whether what is shown is of the question before.
function busy() {
  by("answer").setAttribute("aria-busy", String(Boolean(asking || timer || reading)));
}

function remember(push) {
  const { hash } = toHash(state, held);
  history[push ? "pushState" : "replaceState"]({ state, held }, "", hash);
}

async function ask() {
  if (asking) {
    again = true;
    if (Date.now() - since > LONG) asking.abort();
    return;
  }
  asking = new AbortController();
  since = Date.now();
  busy();
  by("answer").classList.add("old");
  const rows = []; // a row that is simulated takes the place of its formula's
  let chosen = -1;
  try {
    const told = (message) => {
      if (again) return;
      if (message.so_far) {
        chosen = message.so_far.chosen;
        soon(message.so_far, rows);
      } else if (message.plan) {
        rows[message.at] = message.plan;
        if (rows.length < message.of) return; // the formulas' rows come together
        view.rows(rows, chosen, choose, { done: false });
        if (!answer) view.progress(rows.filter((one) => one.depth !== "formula").length, message.of);
      }
    };
    const got = await planner.ask(question(state), told, asking.signal);
    if (!again) await show(got);
  } catch (fault) {
    if (!again) refuse({ text: fault.message, again: true });
  } finally {
    asking = null;
    if (again) {
      again = false;
      ask();
    } else {
      busy();
      by("answer").classList.remove("old");
    }
  }
}

// The plan that the answer is about is done; later rows and the knobs follow.
function soon(found, rows) {
  view.failed(null);
  const known = found.report.plans;
  answer = { ...found, report: { ...found.report, plans: [...known, ...rows.slice(known.length)] } };
  by("answer").classList.remove("old");
  drawPlan();
}

function refuse(error) {
  view.failed(error, error.again ? ask : null);
  by("verdict").className = "card verdict";
  by("verdict").replaceChildren(make("h2", {}, "No answer"), make("p", {}, "The figures below are of the question before."));
  if (!answer) by("verdict").lastChild.remove();
}

async function show(got) {
  if (got.error) return refuse(got.error);
  view.failed(null);
  answer = got;
  draw();
  for (const one of held.filter((other) => !beside.of(other))) {
    const of = await planner.ask(question(one));
    if (of.error) held = held.filter((other) => other !== one);
    else beside.keep(one, of);
    charts();
  }
}

function drawPlan() {
  view.verdict(answer);
  view.notes(answer);
  view.knobs(answer, turn);
  view.lines(answer.report.plans[answer.chosen]);
  by("command").textContent = answer.command;
  document.title = `${answer.verdict}: ${answer.report.model.name}, zeroplan`;
  document.querySelector("[data-copy=command]").disabled = false;
  for (const id of ["make-files", "draw-map"]) by(id).disabled = answer.chosen === null;
  fitted.settle(state, answer);
  by("save-answer").disabled = answer.knobs === null;
  by("made").replaceChildren();
  by("form-row").hidden = true;
  charts();
}

function draw() {
  sync(state, answer, names);
  listFiles(state.files, answer.read, removeFile);
  view.rows(answer.report.plans, answer.chosen, choose);
  drawPlan();
}

function charts() {
  if (!answer) return;
  const shown = held.map((one) => beside.of(one)).filter(Boolean);
  const both = [answer, ...shown].filter((one) => one.timeline);
  const top = Math.max(...both.map((one) => ceiling(one.timeline, one.report.plans[one.chosen].gpu.usable)), 1);
  const draw = (on, of) => {
    const one = of.report.plans[of.chosen];
    on.show(of.timeline, {
      usable: one?.gpu.usable,
      top,
      label: `Timeline. ${of.peak ?? ""}`,
      none: one ? "No timeline: at formula depth only the parts are known. The lines of the plan stand below." : "No plan is shown: choose a row below.",
    });
  };
  by("here-name").textContent = shown.length ? `Now: ${title(answer)}` : title(answer);
  draw(chart, answer);
  beside.show(held, title, draw);
  by("hold").disabled = answer.chosen === null || held.length === MOST_HELD;
  view.legend(answer.timeline, null);
  by("reserved").textContent = answer.timeline ? answer.reserved : "";
  view.difference(answer, shown);
}

function hold(next) {
  held = next;
  remember(true);
  charts();
}

function title(of) {
  const work = of.report.workload;
  const more = [work.gradient_checkpointing && "checkpointing", work.lora_rank && `LoRA ${work.lora_rank}`].filter(Boolean);
  const batch = work.micro_batch && work.seq_len ? [`batch ${work.micro_batch} × ${work.seq_len}`] : []; // a script's own, if captured
  return [of.report.model.name, of.name, ...batch, ...more].join(" · ");
}

function choose(plan) {
  change({ show: { stage: plan.stage, offload_optimizer: plan.offload_optimizer, offload_param: plan.offload_param } }, { push: true });
}

// Turn a knob for the plan that is shown: what it does not change stays as it is.
function turn(knob) {
  const plan = answer.report.plans[answer.chosen];
  const kept = { stage: plan.stage, offload_optimizer: plan.offload_optimizer, offload_param: plan.offload_param };
  const next = changed(state, answer.report.plans.length > 1 || "stage" in knob.change ? { ...kept, ...knob.change } : knob.change);
  go(next, true);
  toast(`${knob.what}: the Back button undoes it`);
}

// The files decide, so what sliders said of the run makes way; the machine stays, and what else no file says.
async function addFiles(added) {
  const together = () => [...(state.files ?? []).filter((one) => !added.some((file) => file.name === one.name)), ...added];
  reading += 1;
  busy();
  const read = await planner.ask({ verb: "read", files: together() }).catch(() => ({})); // the question itself says what fails
  reading -= 1;
  const { model, gpu, vram, gpus, nodes, cpu_ram, nvme } = state;
  const next = { model, gpu, vram, gpus, nodes, cpu_ram, nvme, files: together() };
  for (const name of read.says ?? []) {
    if (next[name] !== undefined) others[name] = next[name];
    delete next[name];
  }
  go({ ...next, ...read.values }, true); // the card for which a run was captured
}

function removeFile(at) {
  const files = state.files.filter((_, index) => index !== at);
  const next = { ...state, files: files.length ? files : null, program: files.length ? state.program : null };
  if (!files.length) for (const [name, value] of Object.entries({ model: FIRST.model, ...others })) next[name] ??= value;
  if (!files.length) others = {};
  go(next, true);
}

// What a search is asked: not what it finds out itself.
function searchQuestion() {
  const { show: _, ...open } = state;
  const batch = by("global-batch");
  const sequences = batch.validity.badInput ? { global_batch: "what is typed" } : batch.value ? { global_batch: Number(batch.value) } : {};
  return searched(question(open, { verb: "recommend", ...sequences }));
}

const searchKey = () => JSON.stringify(searchQuestion());

function forget() {
  sought = "";
  by("found").replaceChildren(make("p", { class: "hint" }, "What was found was for another question."));
}

async function search() {
  const key = searchKey();
  by("search").disabled = true;
  by("found").replaceChildren(make("p", { class: "hint" }, "Searching…"));
  try {
    const got = await planner.ask(searchQuestion());
    if (key !== searchKey()) return forget();
    sought = key;
    if (got.error) by("found").replaceChildren(make("p", { class: "no" }, view.worded(got.error.text)));
    else view.found(got, answer?.read.some((one) => one.as === "run") ? null : apply);
  } catch (fault) {
    by("found").replaceChildren(make("p", { class: "no" }, fault.message));
  } finally {
    by("search").disabled = false;
  }
}

// Show a configuration that the search found, with its own file where it has one.
function apply(choice) {
  const next = changed(searched({ ...state, show: null, dtype: choice.files.length ? null : state.dtype }), choice.change);
  const kept = (state.files ?? []).filter((one) => !choice.files.some((file) => file.name === one.name));
  go({ ...next, files: [...kept, ...choice.files] }, true, { applied: true });
}

function searched(asked) {
  for (const name of ["micro_batch", "grad_accum", "gradient_checkpointing", "alloc_conf", "tp", "sp", "cp", "pp", "vpp"]) delete asked[name];
  return asked;
}

async function makeFiles() {
  const of = answer;
  const plan = answer?.report.plans[answer.chosen];
  if (!plan) return;
  const at = { stage: plan.stage, offload_optimizer: plan.offload_optimizer, offload_param: plan.offload_param };
  const form = by("form-row").hidden ? undefined : by("form").value;
  by("make-files").disabled = true;
  const got = await planner.ask({ ...question(state, { verb: "files", ...(form ? { form } : {}) }), show: at }).catch((fault) => ({ error: { text: fault.message } }));
  by("make-files").disabled = false;
  if (of !== answer) return; // another plan is shown by now
  if (got.error) return by("made").replaceChildren(make("p", { class: "no" }, view.worded(got.error.text)));
  by("form-row").hidden = got.forms.length < 2;
  by("form").replaceChildren(...got.forms.map((name) => make("option", { value: name, selected: name === got.form }, name)));
  const archive = Uint8Array.from(atob(got.archive), (letter) => letter.charCodeAt(0));
  by("made").replaceChildren(
    make("section", {}, make("h3", {}, "Start it"), make("div", { class: "copy" }, make("code", {}, got.start), make("button", { type: "button", onclick: () => copy(got.start) }, "Copy"))),
    make("div", { class: "buttons" }, make("button", { type: "button", class: "primary", onclick: () => save("zeroplan.zip", archive, "application/zip") }, `Download ${got.files.length === 1 ? "it" : `all ${got.files.length}`} as zeroplan.zip`)),
    ...[...got.must, ...got.notes].map((text) => make("p", { class: "hint" }, view.worded(text))),
    ...got.files.map((file) =>
      make(
        "section",
        {},
        make("h3", {}, file.name, make("button", { type: "button", onclick: () => save(file.name, file.text) }, `Download ${file.name}`), make("button", { type: "button", onclick: () => copy(file.text) }, "Copy")),
        make("pre", { tabindex: 0 }, file.text),
      ),
    ),
  );
}

function theme() {
  const root = document.documentElement;
  root.dataset.theme = dark() ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {
    // A page without storage forgets the choice.
  }
}

function wire() {
  build(names, change);
  takeFiles(addFiles, (text) => view.failed({ text }));
  by("controls").addEventListener("focusout", () => setTimeout(() => sync(state, answer, names)));
  by("skip").addEventListener("click", (event) => {
    event.preventDefault(); // what stands after "#" is the question
    by("answer").focus();
    by("answer").scrollIntoView();
  });
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  by("theme").addEventListener("click", theme);
  by("share").addEventListener("click", () => {
    const { hash, whole } = toHash(state, held);
    copy(new URL(hash, location.origin + location.pathname).href, whole ? "Copied" : "Copied, without the files: they are too long for a link");
  });
  by("reset").addEventListener("click", () => go({ ...FIRST }, true));
  by("search").addEventListener("click", search);
  by("make-files").addEventListener("click", makeFiles);
  by("form").addEventListener("change", makeFiles);
  by("save-answer").addEventListener("click", () => save("zeroplan.json", `${JSON.stringify(answer.report, null, 2)}\n`, "application/json"));
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(by(button.dataset.copy).textContent));
  by("hold").addEventListener("click", () => {
    const plan = answer.report.plans[answer.chosen];
    const one = { ...state, show: { stage: plan.stage, offload_optimizer: plan.offload_optimizer, offload_param: plan.offload_param } };
    beside.keep(one, answer);
    if (!held.some((other) => JSON.stringify(other) === JSON.stringify(one))) hold([...held, one]);
  });
  by("draw-map").addEventListener("click", () => fitted.draw(state, answer, by("map-rows").value));
  addEventListener("popstate", (event) => {
    clearTimeout(timer);
    timer = 0;
    ({ state, held } = event.state?.state ? event.state : fromHash(location.hash));
    if (sought && sought !== searchKey()) forget();
    sync(state, answer, names, { typed: true });
    listFiles(state.files, answer?.read, removeFile);
    ask();
  });
}

async function start() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch {
    // As above.
  }
  const loading = by("verdict");
  loading.replaceChildren(make("p", { class: "wait" }, "Planning…"));
  try {
    names = await planner.names((message) => {
      if (message.loading) loading.replaceChildren(make("p", { class: "wait" }, message.loading));
    });
  } catch (fault) {
    loading.replaceChildren(make("h2", {}, "Cannot start"), make("p", {}, fault.message), make("button", { type: "button", onclick: start }, "Try again"));
    return;
  }
  if (names.hub) by("private").textContent = "Only names of models that are not shipped are asked of the hub; nothing else leaves this machine.";
  const slow = names.compiled ? "" : " Simulations run in Python here, without compiled code: rows take longer.";
  by("footer").textContent = `zeroplan ${names.version}.${slow} Sizes are binary: 1 GiB = 2³⁰ bytes, on the GPU that needs the most.`;
  wire();
  sync(state, null, names);
  listFiles(state.files, [], removeFile);
  await ask();
}

start();
