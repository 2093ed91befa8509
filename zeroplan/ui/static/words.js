// Figures as the terminal writes them, and small helpers for making elements.

export const GIB = 2 ** 30;

// One digit, ties to even, as Python's format does: 24.25 is 24.2.
export function gib(bytes, digits = 1) {
  if (bytes === null || bytes === undefined) return "–";
  const scaled = (bytes / GIB) * 10 ** digits;
  const low = Math.floor(scaled);
  const rounded = scaled - low === 0.5 ? low + (low % 2) : Math.round(scaled);
  return (rounded / 10 ** digits).toFixed(digits);
}

export function size(bytes) {
  return bytes >= GIB || bytes === 0 ? `${gib(bytes)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`;
}

export function count(value) {
  return value.toLocaleString("en-US");
}

export function offload(plan) {
  const [optimizer, param] = [plan.offload_optimizer, plan.offload_param];
  if (optimizer === "none" && param === "none") return "none";
  if (optimizer === param) return `optimizer, params ${param}`;
  return [optimizer !== "none" && `optimizer ${optimizer}`, param !== "none" && `params ${param}`].filter(Boolean).join(", ");
}

// What a plan needs at most on one GPU: the figure that is held against the card.
export function needed(plan) {
  const gpu = plan.gpu;
  return gpu.total ?? Math.max(gpu.live_after_step, ...Object.values(gpu.phases ?? {}));
}

export function most(plan) {
  return plan.gpu.interval ? plan.gpu.interval[1] : needed(plan);
}

export function fits(plan) {
  const misses = plan.misfits.length ? ` (${plan.misfits.join(", ")})` : "";
  if (plan.settle) return { kind: "unsure", text: `${plan.verdict === "may fit" ? "may" : "unknown"}${misses}` };
  if (plan.fits === true) return { kind: "yes", text: "yes" };
  if (plan.fits === false) return { kind: "no", text: `no${misses}` };
  return { kind: "", text: "" };
}

// make("p", {class: "hint", onclick: f}, "text", otherElement): texts are never read as HTML.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const by = (id) => document.getElementById(id);

export function toast(text) {
  const place = by("toast");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => place.classList.remove("shown"), 2200);
}

export async function copy(text, said = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
    toast(said);
  } catch {
    toast("The browser does not let a page copy: select the text and copy it");
  }
}

export function save(name, text, type = "text/plain") {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name.split("/").pop() });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function dark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
