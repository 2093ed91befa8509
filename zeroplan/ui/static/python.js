// Python in a worker: the page's back end where no server runs. `make page` puts what it loads beside it: pyodide/,
// packages.zip, and the shipped tapes: a file of them is fetched once a question needs it, and then the question is asked again.

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

def fetchable(names):
    from zeroplan.tapes import shipped
    shipped.FETCHABLE.update(names)
    return shipped.DATA

def settled(name):
    from zeroplan.tapes import shipped
    shipped.FETCHABLE.discard(name)
`;

// Milliseconds after which a file that does not come is given up, and so is the start.
const PATIENCE = { tape: 30_000, start: 240_000 };

let tell = () => {};

async function fetched(name, patience = PATIENCE.start) {
  const got = await fetch(beside(name), { signal: AbortSignal.timeout(patience) }).catch((fault) => {
    throw new Error(`${name} cannot be fetched: ${fault.name === "TimeoutError" ? "nothing came in time" : "the network or the server does not answer"}`);
  });
  if (!got.ok) throw new Error(`${name} cannot be fetched: the server answered ${got.status}`);
  return got;
}

// What never ends is given up, too.
function inTime(promise, text) {
  return Promise.race([promise, new Promise((_, reject) => setTimeout(() => reject(new Error(text)), PATIENCE.start))]);
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
  python.runPython(GLUE);
  const offer = python.globals.get("fetchable");
  const folder = offer(python.toPy(tapes));
  python.FS.mkdirTree(folder);
  const put = (name, data) => {
    python.FS.writeFile(`${folder}/${name}`, data);
    python.globals.get("settled")(name);
  };
  put("same.json", new Uint8Array(await (await fetched("tapes/same.json")).arrayBuffer()));
  return { ask: python.globals.get("ask"), offered: python.globals.get("offered"), put };
}

// Ask until every tape that the question needs is here; one that cannot be fetched is an answer, and what is loaded goes on.
async function answered(python, question, say) {
  for (;;) {
    const found = JSON.parse(python.ask(question, say));
    if (!found.fetch) return found;
    try {
      const got = await fetched(`tapes/${found.fetch}`, PATIENCE.tape);
      python.put(found.fetch, new Uint8Array(await got.arrayBuffer()));
    } catch (fault) {
      return { error: { text: `this model's tape is not loaded: ${fault.message}`, where: "", again: true } };
    }
  }
}

let loading = null;

onmessage = async ({ data }) => {
  const say = (message) => postMessage({ id: data.id, ...message });
  tell = (text) => say({ loading: text });
  try {
    loading ??= inTime(load(), "loading Python took too long");
    const python = await loading;
    if (data.names) return say({ answer: JSON.parse(python.offered()) });
    say({ answer: await answered(python, JSON.stringify(data.question), (text) => say(JSON.parse(text))) });
  } catch (fault) {
    if (fault.name !== "PythonError") loading = null; // nothing was loaded, or Python has ended: the next question starts anew
    say({ fault: String(fault.message).trim().split("\n").at(-1) });
  }
};
