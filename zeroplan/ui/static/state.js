// What is asked: the fields that differ from their defaults, the plan that is shown, and files. All of it stands in the
// address after "#", which a browser sends nowhere.

const NUMBERS = ["seq_len", "micro_batch", "grad_accum", "gpus", "nodes", "lora_rank", "tp", "cp", "pp", "vpp"];
const TEXTS = ["model", "gpu", "vram", "cpu_ram", "nvme", "engine", "dtype", "optimizer", "attn", "quantize", "alloc_conf", "program"];
const SWITCHES = ["gradient_checkpointing", "from_scratch", "sp"];
export const PLAN = ["stage", "offload_optimizer", "offload_param"];
// A link with more than this many characters of files is cut by mail programs and chats.
const MOST_FILES = 6000;
// Plans that are held beside the one shown, at most.
export const MOST_HELD = 3;

export const FIRST = { model: "meta-llama/Llama-3.1-8B", gpu: "H100", gpus: 8 };

export function toText(state) {
  const found = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) if (state[name] !== undefined && state[name] !== null) found.set(name, state[name]);
  for (const name of SWITCHES) if (state[name]) found.set(name, "1");
  if (state.show) found.set("show", PLAN.map((key) => state.show[key]).join("."));
  for (const file of state.files ?? []) found.append("file", `${file.name}\n${file.text}`);
  return found.toString();
}

export function fromText(text) {
  const given = new URLSearchParams(text);
  const state = {};
  for (const name of TEXTS) if (given.get(name)) state[name] = given.get(name).slice(0, 4096);
  for (const name of NUMBERS) {
    const value = Number(given.get(name));
    if (given.get(name)) state[name] = Number.isSafeInteger(value) ? value : given.get(name).slice(0, 40); // refused by name
  }
  for (const name of SWITCHES) if (given.get(name) === "1") state[name] = true;
  if (given.get("show")) {
    const [stage, optimizer, param] = given.get("show").slice(0, 40).split(".");
    state.show = { stage: /^\d+$/.test(stage) ? Number(stage) : stage, offload_optimizer: optimizer ?? "", offload_param: param ?? "" }; // what is no plan is refused
  }
  const files = given.getAll("file").map((one) => {
    const [name, ...text] = one.split("\n");
    return { name, text: text.join("\n") };
  });
  if (files.length) state.files = files;
  return state;
}

// The address's part after "#": this state, and each held plan's under "held".
export function toHash(state, held) {
  const big = (state.files ?? []).reduce((sum, file) => sum + file.text.length, 0) > MOST_FILES;
  const text = toText(big ? { ...state, files: [] } : state);
  return { hash: `#${text}${held.map((one) => `&held=${encodeURIComponent(toText({ ...one, files: [] }))}`).join("")}`, whole: !big };
}

export function fromHash(hash) {
  const text = hash.replace(/^#/, "");
  const held = new URLSearchParams(text).getAll("held").slice(0, MOST_HELD).map(fromText);
  const state = fromText(text);
  return { state: Object.keys(state).length ? state : { ...FIRST }, held };
}

// A bare count stands where a model's name would: 7.5B.
const COUNT = /^\d+(\.\d+)?\s*[kmbt]?$/i;

export function question(state, more = {}) {
  const asked = { verb: "estimate", ...more };
  for (const name of [...TEXTS, ...NUMBERS, ...SWITCHES]) {
    if (state[name] !== undefined && state[name] !== null && state[name] !== false) asked[name] = state[name];
  }
  if (asked.model && COUNT.test(asked.model.trim())) {
    asked.params = asked.model.trim();
    delete asked.model;
  }
  if (asked.gpu) delete asked.vram;
  if (state.show) asked.show = state.show;
  if (state.files?.length) asked.files = state.files;
  return asked;
}

// The fields of a change, with those that name a plan put under "show".
export function changed(state, change) {
  const next = { ...state };
  const show = {};
  for (const [name, value] of Object.entries(change)) {
    if (PLAN.includes(name)) show[name] = value;
    else if (value === "" || value === false || value === null || (name === "grad_accum" && value === 1)) delete next[name];
    else next[name] = value;
  }
  if (show.stage !== undefined) next.show = { offload_optimizer: "none", offload_param: "none", ...show };
  return next;
}
