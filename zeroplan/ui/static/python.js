// Python in a worker: the page's back end where no server runs. `make page` puts what it loads beside it: pyodide/,
// packages.zip, and the shipped tapes, each of which is fetched when a question first needs it.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const beside = (name) => new URL(name, import.meta.url).href;

const GLUE = `
import gc, json, os
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
gc.set_threshold(50_000, 20, 100)
from zeroplan.ui.answers import answer_text, names

def ask(question, say):
    return answer_text(question.encode(), lambda message: say(json.dumps(message)))

def offered():
    return json.dumps(names())
`;

let tell = () => {};

async function fetched(name) {
  const got = await fetch(beside(name));
  if (!got.ok) throw new Error(`${name} is missing: ${got.status}`);
  return got;
}

async function load() {
  tell("Loading Python (about 9 MB, once)…");
  const [python, packages, tapes] = await Promise.all([
    loadPyodide({ indexURL: beside("pyodide/") }),
    fetched("packages.zip").then((got) => got.arrayBuffer()),
    fetched("tapes.json").then((got) => got.json()),
  ]);
  tell("Starting Python…");
  const site = python.runPython("import site; site.getsitepackages()[0]");
  python.unpackArchive(new Uint8Array(packages), "zip", { extractDir: site });
  const folder = `${site}/zeroplan/tapes/data`;
  python.FS.mkdirTree(folder);
  for (const name of tapes) python.FS.createLazyFile(folder, name, beside(`tapes/${name}`), true, false);
  python.runPython(GLUE);
  return { ask: python.globals.get("ask"), offered: python.globals.get("offered") };
}

let loading = null;

onmessage = async ({ data }) => {
  const say = (message) => postMessage({ id: data.id, ...message });
  tell = (text) => say({ loading: text });
  try {
    loading ??= load();
    const python = await loading;
    if (data.names) return say({ answer: JSON.parse(python.offered()) });
    say({ answer: JSON.parse(python.ask(JSON.stringify(data.question), (text) => say(JSON.parse(text)))) });
  } catch (fault) {
    if (fault.name !== "PythonError") loading = null; // nothing was loaded, or Python has ended: the next question starts anew
    say({ fault: String(fault.message).trim().split("\n").at(-1) });
  }
};
