// The zoo's page: one module. Each part starts where its element is; the views of the store work without it.
// What comes from models and names is set as text. HTML is set only where this server has made and escaped it.

const MARKED = { "X-Zoo-Page": "1" };
const at = (id) => document.getElementById(id);

/** Returns a response, or throws what the server says is wrong. */
async function fetched(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...MARKED, ...options.headers } });
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error?.message ?? `The server answered ${response.status}.`);
}

/** Shows the server's state as it changes. */
function watch(target, note) {
  const source = new EventSource(target.dataset.events);
  source.onopen = () => { note.textContent = "follows what the server does"; };
  source.onmessage = (event) => { target.innerHTML = event.data; };
  source.onerror = () => {
    const closed = source.readyState === EventSource.CLOSED;
    note.textContent = closed ? "not live any more: load the page again" : "the server does not answer; trying again";
  };
}

/** Fills in the distances of the weights of two models. */
async function measure(button, note) {
  button.disabled = true;
  note.textContent = "measuring…";
  try {
    const found = await (await fetched(button.dataset.from, { method: "POST" })).json();
    found.distances.forEach((distance, pair) => {
      const cell = document.querySelector(`[data-pair="${pair}"]`);
      if (cell) cell.textContent = distance === null ? "–" : distance === 0 ? "0" : distance.toPrecision(3);
    });
    note.textContent = found.share < 1 ? `over the first ${(100 * found.share).toPrecision(2)} % of each tensor` : "over all weights that differ";
  } catch (error) {
    note.textContent = error.message;
  }
  button.disabled = false;
}

/** Starts work on the store, and follows it. */
function keep(buttons, target, note) {
  const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
  async function follow() {
    while (target.querySelector("[data-running]")) {
      await wait(0.5);
      target.innerHTML = await (await fetched(target.dataset.from)).text();
    }
  }
  async function start(button) {
    if (button.dataset.sure && !confirm(button.dataset.sure)) return;
    note.textContent = "";
    try {
      await fetched(button.dataset.start, { method: "POST" });
      target.innerHTML = await (await fetched(target.dataset.from)).text();
      await follow();
    } catch (error) {
      note.textContent = error.message;
    }
  }
  for (const button of buttons) button.addEventListener("click", () => start(button));
  follow();
}

/** Yields the documents of a stream of server-sent events. */
async function* documents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Asks one model, and shows its answer while it comes. */
async function ask(model, order, section, signal) {
  const show = (name, text) => { section.querySelector(name).textContent = text; };
  const answer = section.querySelector("pre");
  show("h2", model);
  const asked = performance.now();
  let first = null, tokens = 0, served = model;
  try {
    const body = JSON.stringify({ ...order.body, model, stream: true, stream_options: { include_usage: true } });
    const response = await fetched(order.route, { method: "POST", body, signal, headers: { "Content-Type": "application/json" } });
    for await (const part of documents(response)) {
      if (part.error) throw new Error(part.error.message);
      const choice = part.choices?.[0];
      const text = choice?.text ?? choice?.delta?.content ?? "";
      if (text) {
        first ??= performance.now();
        tokens += 1;
        answer.append(text);
        show(".first", `${Math.round(first - asked)} ms`);
      }
      served = choice?.served_by ?? part.served_by ?? served;
      if (choice?.finish_reason) show(".end", choice.finish_reason);
      tokens = part.usage?.completion_tokens ?? tokens;
      const seconds = first === null ? 0 : (performance.now() - first) / 1000;
      show(".tokens", `${tokens}`);
      if (tokens > 1 && seconds > 0) show(".rate", ((tokens - 1) / seconds).toFixed(1));
    }
    show(".served-by", served);
    section.querySelector(".served-by").classList.toggle("other", served !== model);
  } catch (error) {
    show(".end", error.name === "AbortError" ? "stopped" : error.message);
    section.querySelector(".end").classList.toggle("error", error.name !== "AbortError");
  }
}

/** The playground: one prompt to several models at once. */
function play(form) {
  let stopping = null;
  at("stop").addEventListener("click", () => stopping?.abort());
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stopping) return;
    const models = [...at("models").selectedOptions].map((option) => option.value);
    const most = Number(form.dataset.most);
    at("playground-note").textContent = models.length === 0 ? "Choose a model." : models.length > most ? `Choose ${most} models at most.` : "";
    if (models.length === 0 || models.length > most) return;
    const route = at("route").value, prompt = at("prompt").value;
    const body = {
      max_tokens: Number(at("max_tokens").value), temperature: Number(at("temperature").value), seed: Number(at("seed").value),
      adaptive: at("adaptive").checked,
      ...(route === "/v1/completions" ? { prompt } : { messages: [{ role: "user", content: prompt }] }),
    };
    const sections = models.map(() => at("answer").content.firstElementChild.cloneNode(true));
    at("answers").replaceChildren(...sections);
    stopping = new AbortController();
    at("stop").disabled = false;
    await Promise.all(models.map((model, number) => ask(model, { route, body }, sections[number], stopping.signal)));
    stopping = null;
    at("stop").disabled = true;
  });
}

const live = at("live"), upkeep = at("upkeep"), playground = at("playground"), button = at("measure");
if (live) watch(live, at("live-note"));
if (upkeep && at("upkeep-note")) keep(document.querySelectorAll("[data-start]"), upkeep, at("upkeep-note"));
if (playground) play(playground);
if (button) button.addEventListener("click", () => measure(button, at("measure-note")));
