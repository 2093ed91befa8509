// Who answers: the server of `zeroplan ui`, or Python in a worker of this page. Both take a question and say the same things.

// A request to the server; `signal` ends it.
async function sent(path, options) {
  try {
    return await fetch(path, options);
  } catch (fault) {
    throw fault.name === "AbortError" ? fault : new Error(GONE);
  }
}

const GONE = "the server of this page does not answer; start zeroplan ui again, and open the address that it prints";

// What tells the server that this is its own user. It comes with the address that the terminal shows, and is kept for this
// server's pages, so that it need not stand in the address, nor in a link that is passed on.
function token() {
  const given = new URLSearchParams(location.search).get("token");
  try {
    if (!given) return localStorage.getItem("token") ?? "";
    localStorage.setItem("token", given);
    history.replaceState(history.state, "", location.pathname + location.hash);
  } catch {
    // A page without storage keeps it in its address.
  }
  return given ?? "";
}

class Server {
  #token = token();

  async names() {
    const answer = await sent("api/names", { headers: { "X-Zeroplan-Token": this.#token } });
    if (answer.status === 403) throw new Error((await answer.json()).error.text);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  }

  // Resolves to the answer; `say` is told of each plan as it is done, and of the answer without its knobs.
  async ask(question, say = () => {}, signal = undefined) {
    const answer = await sent("api/ask", {
      signal,
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Zeroplan-Token": this.#token },
      body: JSON.stringify(question),
    });
    if (!answer.ok) {
      const text = answer.headers.get("content-type")?.startsWith("application/json")
        ? (await answer.json()).error.text
        : `the server answered ${answer.status}`;
      return { error: { text } };
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let last = null;
    for (;;) {
      const { value, done } = await reader.read().catch((fault) => {
        throw fault.name === "AbortError" ? fault : new Error(GONE);
      });
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const message = JSON.parse(line);
        if ("answer" in message) last = message.answer;
        else say(message);
      }
    }
    return last ?? { error: { text: "the server ended its answer halfway", again: true } };
  }
}

export class InThePage {
  #worker = null;
  #waiting = new Map();
  #next = 0;

  // A worker that cannot be started is given up, and the next question starts another.
  #started() {
    if (this.#worker) return this.#worker;
    const worker = new Worker(new URL("python.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => {
      const one = this.#waiting.get(data.id);
      if (!one) return;
      if ("answer" in data || "fault" in data) {
        this.#waiting.delete(data.id);
        if ("fault" in data) one.reject(new Error(data.fault));
        else one.resolve(data.answer);
      } else one.say(data);
    };
    worker.onerror = (event) => {
      worker.terminate();
      this.#worker = null;
      for (const one of this.#waiting.values()) one.reject(new Error(event.message || "the worker could not be started"));
      this.#waiting.clear();
    };
    return (this.#worker = worker);
  }

  #send(message, say) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject, say });
      this.#started().postMessage({ id, ...message });
    });
  }

  names(say = () => {}) {
    return this.#send({ names: true }, say);
  }

  ask(question, say = () => {}) {
    return this.#send({ question }, say);
  }
}

export function backend() {
  const kind = document.querySelector("meta[name=zeroplan-backend]")?.content;
  return kind === "worker" ? new InThePage() : new Server();
}
