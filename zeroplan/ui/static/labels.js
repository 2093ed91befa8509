// The page's own words for the flags of the command line: what a message blames is found on the page under its name.

// Each option's control: its words, and the value that it stands for where it is a switch.
export function labelsOf(root) {
  const own = (element) => element.closest("label")?.firstChild.textContent.trim() || element.closest("label")?.textContent.trim();
  const found = new Map();
  for (const one of root.querySelectorAll("[data-field]")) found.set(one.dataset.field, { words: own(one), value: one.type === "checkbox" ? "" : undefined });
  for (const one of root.querySelectorAll("[data-slider]")) found.set(one.dataset.slider, { words: one.dataset.label });
  for (const one of root.querySelectorAll("[data-plan]")) found.set(one.dataset.plan, { words: one.dataset.label });
  for (const one of root.querySelectorAll("[data-toggle]")) found.set(one.dataset.toggle, { words: own(one), value: one.dataset.on });
  found.set("params", found.get("model"));
  found.set("global_batch", { words: root.getElementById("global-batch").closest("label").firstChild.textContent.trim() });
  return found;
}

// The text with “Micro batch” for --micro-batch; an option that has no control is said to be the command line's.
export function named(text, labels) {
  return text.replace(/--(no-)?([a-z][a-z0-9-]*)(?:[ =]([\w.:/]+[\w/]))?/g, (_, no, flag, value) => {
    const label = labels.get(flag.replaceAll("-", "_"));
    const rest = value === undefined ? "" : ` ${value}`;
    if (!label) return `the command line's “${no ?? ""}${flag}”${rest}`;
    return `“${label.words}”${no ? " off" : value === label.value ? "" : rest}`;
  });
}
