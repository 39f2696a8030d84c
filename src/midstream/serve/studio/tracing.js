// The tab "Causal tracing": a form, the sweep's events as they come, and the top tokens of a chosen cell.

import { find, isWrong, make, note, number, percent } from "./dom.js";
import { eventsOf } from "./events.js";
import { columnsOf, Heatmap, nameOf, Scale } from "./heatmap.js";
import { failure, respond, root, settled, tokenize } from "./server.js";
import { comparison, textsOf, visible } from "./tokens.js";

const SWEEPS = "v1/midstream/sweeps";
const FIELDS = ["clean", "corrupt", "answer", "foil", "sites", "metric", "direction"];
const METRICS = { logit_diff: "logit difference", logprob: "log-probability", recovered: "recovered" };
const TOP = 10;
const prompts = { clean: null, corrupt: null }; // the tokens of each: `{ids, texts}`
let sweep = null; // the one on the page
let asking = null; // aborts the question for a cell's top tokens

export function listen() {
  for (const name of ["clean", "corrupt"]) {
    const reading = settled((signal) => readPrompt(name, signal));
    find(name).addEventListener("input", () => {
      note(name, "");
      reading();
    });
  }
  for (const name of ["answer", "foil"]) {
    const checking = settled((signal) => checkToken(name, signal));
    find(name).addEventListener("input", checking);
    find(`${name}-space`).addEventListener("click", () => {
      find(name).value = ` ${find(name).value}`;
      find(name).focus();
      checkToken(name);
    });
  }
  find("site-list").addEventListener("change", () => note("sites", ""));
  find("heads").addEventListener("change", () => {
    find("site-list").inert = find("heads").checked; // only attn_z has heads
    note("sites", "");
  });
  find("metric").addEventListener("change", () => {
    note("metric", "");
    if (!find("foil").value) note("foil", "");
  });
  find("sweep").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  find("cancel").addEventListener("click", () => sweep?.controller.abort());
  find("example").addEventListener("click", fillExample);
  find("copy").addEventListener("click", copy);
  find("export").addEventListener("click", () => save("sweep.csv", sweep.table()));
}

/** The server is there: list its sites, and check what the form already holds. */
export function connected(capabilities) {
  const ticked = new Set(chosenSites());
  if (!ticked.size) ticked.add("resid_post");
  find("site-list").replaceChildren(
    ...Object.keys(capabilities.sites).map((site) => {
      const box = make("input", { type: "checkbox", name: "site", value: site, id: `site-${site}` });
      box.checked = ticked.has(site);
      return make("label", { for: box.id }, box, site);
    }),
  );
  for (const name of ["clean", "corrupt"]) readPrompt(name);
  for (const name of ["answer", "foil"]) checkToken(name);
}

function chosenSites() {
  return [...find("site-list").querySelectorAll("input:checked")].map((each) => each.value);
}

function fillExample() {
  const example = { clean: "The capital of France is", corrupt: "The capital of Italy is", answer: " Paris", foil: " Rome" };
  for (const [name, text] of Object.entries(example)) {
    find(name).value = text;
    find(name).dispatchEvent(new Event("input"));
  }
  find("run").focus();
}

// Prompts and answers, checked while they are typed.

async function readPrompt(name, signal) {
  const text = find(name).value;
  prompts[name] = null;
  if (text) {
    try {
      const { ids, strings } = await tokenize(text, { special: true, signal });
      prompts[name] = { ids, texts: textsOf(strings, text) };
    } catch (error) {
      if (error.name === "AbortError") return;
      note(name, error.message, "error");
    }
  }
  showChips("clean", "corrupt");
  showChips("corrupt", "clean");
}

function showChips(name, other) {
  const own = prompts[name];
  const kinds = own && prompts[other] ? comparison(own.ids, prompts[other].ids) : [];
  find(`${name}-tokens`).replaceChildren(
    ...(own?.texts ?? []).map((text, i) => {
      const kind = kinds[i] ?? "same";
      const chip = make("li", { class: kind, title: `position ${i}, token ${own.ids[i]}` }, visible(text));
      if (kind === "changed") chip.append(make("span", { class: "unseen" }, " (differs)"));
      if (kind === "unaligned") chip.append(make("span", { class: "unseen" }, " (no counterpart)"));
      return chip;
    }),
  );
  const alone = kinds.filter((kind) => kind === "unaligned").length;
  if (own && !isWrong(name)) note(name, `${own.ids.length} tokens${alone ? `, ${alone} without a counterpart` : ""}`);
}

/** Check that a field holds one token, and say which. */
async function checkToken(name, signal) {
  const text = find(name).value;
  find(`${name}-space`).hidden = true;
  if (!text) return note(name, "");
  try {
    const { ids, strings } = await tokenize(text, { special: false, signal });
    if (ids.length === 1) return note(name, `${visible(textsOf(strings, text)[0])} is token ${ids[0]}`, "good");
    const pieces = textsOf(strings, text).map(visible).join(" | ");
    note(name, `${ids.length} tokens: ${pieces}. One is needed.`, "error");
    if (!text.startsWith(" ")) {
      const spaced = await tokenize(` ${text}`, { special: false, signal });
      find(`${name}-space`).hidden = spaced.ids.length !== 1;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    note(name, `Cannot be checked: ${error.message}`); // the sweep checks it again
  }
}

/** Check all fields; focus the first that is wrong. */
async function isComplete(body) {
  for (const name of ["clean", "corrupt"]) if (!body[name]) note(name, "Enter a prompt.", "error");
  note("metric", "");
  note("direction", "");
  note("sites", body.sites.length ? "" : "Tick at least one site.", body.sites.length ? "" : "error");
  await Promise.all([checkToken("answer"), checkToken("foil")]);
  if (!body.answer) note("answer", "Enter an answer of one token.", "error");
  if (!body.foil && body.metric === "logit_diff") note("foil", "The logit difference needs a foil.", "error");
  return !focusWrong();
}

function focusWrong() {
  const wrong = FIELDS.find(isWrong);
  if (wrong) (wrong === "sites" ? find("site-list").querySelector("input") : find(wrong))?.focus();
  return wrong;
}

// The sweep.

function bodyOfForm() {
  const byHead = find("heads").checked;
  return {
    clean: find("clean").value,
    corrupt: find("corrupt").value,
    answer: find("answer").value,
    foil: find("foil").value || null,
    sites: byHead ? ["attn_z"] : chosenSites(),
    layers: "all",
    positions: byHead ? "together" : "all",
    metric: find("metric").value,
    direction: find("direction").value,
    source: "run",
    heads: byHead ? "all" : null,
    coarse: null,
    best: 3,
    top: 0,
  };
}

async function run() {
  if (find("run").disabled) return;
  const body = bodyOfForm();
  find("run").disabled = true;
  showAlert("");
  try {
    if (!(await isComplete(body))) return;
    asking?.abort();
    sweep = new Sweep(body);
    find("cancel").disabled = false;
    await sweep.run();
  } catch (error) {
    showError(error);
  } finally {
    find("run").disabled = false;
    find("cancel").disabled = true;
  }
}

function showError(error) {
  const field = FIELDS.find((each) => error.param?.split(/[.[]/).includes(each));
  if (field === undefined) return showAlert(error.message);
  note(field, error.message, "error");
  focusWrong();
}

const showAlert = (text) => (find("sweep-alert").textContent = text);

class Sweep {
  constructor(body) {
    this.body = body;
    this.controller = new AbortController();
    this.heatmaps = new Map();
    this.scale = null;
    this.waiting = []; // cells that have come and are not drawn
    this.done = this.cells = 0;
  }

  async run() {
    find("progress").textContent = "Starting…";
    try {
      const response = await respond(SWEEPS, { body: this.body, signal: this.controller.signal });
      this.clear();
      for await (const { data } of eventsOf(response.body)) this.take(JSON.parse(data));
      if (!this.isOver) throw failure("The connection ended before the sweep did.");
    } catch (error) {
      this.draw();
      const done = this.cells ? ` after ${this.done} of ${this.cells} cells` : "";
      find("progress").textContent = `${error.name === "AbortError" ? "Cancelled" : "Failed"}${done}`;
      if (error.name !== "AbortError") throw error;
    } finally {
      find("bar").hidden = true;
      find("progress").setAttribute("aria-busy", "false");
    }
  }

  clear() {
    find("figures").replaceChildren();
    find("empty").hidden = true;
    find("legend").hidden = find("taking").hidden = true;
    find("readout").replaceChildren();
    clearTop("Point at a cell to read it. Click it, or press Enter, for its top tokens.");
  }

  take(event) {
    const take = { start: this.begin, baselines: this.compare, cell: this.hold, summary: this.end };
    if (event.error) throw failure(event.error);
    take[event.event]?.call(this, event);
  }

  begin(outline) {
    this.outline = outline;
    this.cells = outline.cells;
    const [pair] = outline.pairs;
    const [own, other] = this.isNoising ? [pair.clean, pair.corrupt] : [pair.corrupt, pair.clean];
    const changed = columnsOf(outline.grid).map(({ positions, sources, head }) => {
      if (head !== undefined) return false;
      const [at] = positions[0] ?? [];
      const [source] = sources?.[0] ?? [];
      return at !== undefined && source !== undefined && own[at] !== other?.[source];
    });
    const hands = { point: (place) => this.read(place), choose: (place) => this.choose(place) };
    for (const site of outline.grid.sites) {
      const heatmap = new Heatmap(site, outline, changed, hands);
      this.heatmaps.set(site, heatmap);
      find("figures").append(heatmap.element);
    }
    find("bar").hidden = false;
    find("progress").setAttribute("aria-busy", "true"); // screen readers announce the end, not every cell
    this.showProgress();
  }

  get isNoising() {
    return this.body.direction === "noising";
  }

  get patched() {
    return this.isNoising ? "clean" : "corrupt";
  }

  /** The two prompts' values without a patch are the scale's ends. */
  compare({ clean, corrupt }) {
    const metric = { logit_diff: ([a, b]) => a - b, logprob: ([a]) => a, recovered: null }[this.body.metric];
    const [low, high] = metric ? [metric(corrupt), metric(clean)] : [0, 1];
    this.scale = this.isNoising ? new Scale(high, low) : new Scale(low, high);
    this.recolour();
  }

  /** Cells are drawn together, once for each frame of the screen: a fast server sends thousands in a second. */
  hold(cell) {
    if (!this.waiting.length) requestAnimationFrame(() => this.draw());
    this.waiting.push(cell);
  }

  draw() {
    const cells = this.waiting.splice(0);
    if (!cells.length) return;
    this.done += cells.length;
    const wider = cells.filter(({ value }) => value !== null && this.scale?.hold(value));
    for (const cell of cells) this.heatmaps.get(cell.site).show(cell, this.scale);
    if (wider.length) this.recolour();
    else if (this.scale) this.legend();
    if (cells.includes(this.pointed?.cell)) this.read(this.pointed);
    if (!this.isOver) this.showProgress();
  }

  recolour() {
    for (const heatmap of this.heatmaps.values()) heatmap.recolour(this.scale);
    this.legend();
  }

  legend() {
    showLegend(this.scale, METRICS[this.body.metric], this.patched);
  }

  showProgress() {
    find("bar").max = this.cells || 1;
    find("bar").value = this.done;
    find("progress").textContent = `${this.done} of ${this.cells} cells`;
  }

  end({ noise_floor, cells, void: voids, seconds }) {
    this.isOver = true;
    this.draw();
    for (const heatmap of this.heatmaps.values()) heatmap.markQuiet(this.scale.centre, noise_floor);
    const parts = [`${cells} cells in ${seconds.toFixed(1)} s`, `noise floor ${small(noise_floor)}`];
    if (voids) parts.push(`${voids} void`);
    find("progress").textContent = parts.join(" · ");
    find("taking").hidden = false;
    find("taking-note").textContent = "";
    if (this.pointed) this.read(this.pointed);
  }

  /** The same sweep in Python. A JSON string is one of Python's, too. */
  python() {
    const { clean, corrupt, answer, foil, sites, metric, direction } = this.body;
    const texts = [clean, corrupt, answer, ...(foil === null ? [] : [foil])].map((text) => JSON.stringify(text));
    const { heads, positions } = this.body;
    const rest = { sites, metric, direction, ...(heads ? { heads, positions } : {}) };
    const given = Object.entries(rest).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
    const server = root.href.replace(/\/$/, "");
    return `from midstream import Remote

model = Remote(${JSON.stringify(server)})  # api_key=, if the server needs one
result = model.sweep(
    ${[...texts, ...given].join(",\n    ")},
)
for site in result.outline.grid.sites:
    result.plot(site)
`;
  }

  /** All cells as comma-separated values. */
  table() {
    const places = [...this.heatmaps.values()].flatMap(({ places }) => places.flat());
    const head = ["site", "layer", "position", "column", "logprob", "foil_logprob", "value", "recovered", "void"];
    const rows = places.map(({ site, layers, positions, label, head, cell }) => {
      const of = [cell?.logprobs?.[0], cell?.logprobs?.[1], cell?.value, cell?.recovered, cell?.void];
      return [site, layers.join(" "), positions?.join(" "), head === undefined ? label : `head ${head}`, ...of];
    });
    return [head, ...rows].map((row) => row.map(quoted).join(",") + "\r\n").join("");
  }

  /** Show a cell's numbers. */
  read(place) {
    this.pointed = place;
    const { cell } = place;
    const rows = [
      ["Site", place.site],
      ["Layer", place.layers.join(", ")],
      place.head === undefined ? ["Token", visible(place.label)] : ["Head", String(place.head)],
      ["Position", place.positions?.join(", ") ?? "–"],
    ];
    if (cell?.void || place.positions === null) rows.push(["Void", cell?.void ?? "No token of the other prompt corresponds."]);
    else if (!cell) rows.push(["Value", "not run yet"]);
    else {
      rows.push([METRICS[this.body.metric], number(cell.value)]);
      if (this.scale) rows.push(["Change", number(cell.value - this.scale.centre)]);
      if (this.body.metric !== "recovered") rows.push(["Recovered", number(cell.recovered)]);
      for (const [i, name] of ["answer", "foil"].entries()) {
        if (cell.logprobs?.[i] !== undefined) rows.push([`log p(${visible(this.body[name])})`, number(cell.logprobs[i])]);
      }
      if (place.isQuiet) rows.push(["Noise", "within the noise floor"]);
    }
    find("readout").replaceChildren(
      ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
    );
  }

  /** Ask for a cell's top tokens, by the same sweep of that cell alone. */
  async choose(place) {
    asking?.abort();
    const controller = (asking = new AbortController());
    for (const each of document.querySelectorAll(".cell.chosen")) each.classList.remove("chosen");
    place.element.classList.add("chosen");
    this.read(place);
    if (!place.cell || place.cell.void !== null) return clearTop("This cell has no run of its own.");
    clearTop(`Running layer ${place.layers.join(", ")} at ${nameOf(place)} again…`);
    const { head, positions } = place;
    const places = head === undefined ? { positions } : { heads: [head] };
    const one = { ...this.body, sites: [place.site], layers: place.layers, ...places, top: TOP };
    try {
      const response = await respond(SWEEPS, { body: one, signal: controller.signal });
      const found = {};
      for await (const { data } of eventsOf(response.body)) {
        const event = JSON.parse(data);
        if (event.error) throw failure(event.error);
        if (event.event === "cell") found.patched = event.top;
        if (event.event === "noise" && event.kind === "baseline") found.plain ??= event.top;
      }
      showTop(place, found, this);
    } catch (error) {
      if (error.name !== "AbortError") clearTop(error.message, "error");
    }
  }
}

// What can be taken from the page.

async function copy() {
  try {
    await navigator.clipboard.writeText(sweep.python());
    find("taking-note").textContent = "Copied.";
  } catch {
    save("sweep.py", sweep.python()); // a browser keeps the clipboard from pages of plain http
  }
}

function save(name, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text])), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
  find("taking-note").textContent = `Saved as ${name}.`;
}

/** A field of a table, with quotes if it needs them. */
function quoted(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** A number that is not rounded to zero. */
function small(value) {
  if (value === 0 || value >= 0.001) return number(value, value === 0 ? 0 : 3);
  return value.toExponential(0).replace("-", "−");
}

// The colour bar.

/** The bar goes from the lowest value on the page to the highest. */
function showLegend(scale, metric, patched) {
  const other = patched === "clean" ? "corrupt" : "clean";
  const { low, high, centre, reach } = scale;
  const place = (value) => (100 * (value - low)) / (high - low || 1);
  const share = (value) => `${100 * Math.abs(scale.amount(value))}%`;
  const gradient = find("gradient");
  for (const [name, value] of [["--below", share(low)], ["--above", share(high)], ["--white", `${place(centre)}%`]]) {
    gradient.style.setProperty(name, value);
  }
  gradient.setAttribute("aria-label", `Colours: ${metric} from ${number(low, 2)}, red, to ${number(high, 2)}, blue`);
  const named = [[place(centre), `${patched} ${number(centre, 2)}`], [place(reach), `${other} ${number(reach, 2)}`]];
  const ends = [[0, number(low, 2)], [100, number(high, 2)]];
  const ticks = [...named, ...ends.filter(([at]) => named.every(([taken]) => Math.abs(taken - at) > 20))];
  find("ticks").replaceChildren(
    ...ticks.map(([place, text]) => {
      const tick = make("span", { class: place < 12 ? "first" : place > 88 ? "last" : "" }, text);
      tick.style.setProperty("--at", `${place}%`);
      return tick;
    }),
  );
  find("legend").hidden = false;
}

// A cell's top tokens.

function clearTop(text, kind = "") {
  find("top-note").textContent = text;
  find("top-note").className = `note ${kind}`;
  find("top-title").hidden = true;
  find("top").replaceChildren();
}

function showTop(place, { patched, plain }, sweep) {
  clearTop(`${place.site}, layer ${place.layers.join(", ")}, ${nameOf(place)}`);
  find("top-title").hidden = false;
  const { answer, foil } = sweep.body;
  const list = (title, top) => {
    const items = (top ?? []).map(([token, logprob]) => {
      const kind = token === answer ? "answer" : token === foil ? "foil" : "";
      const item = make("li", { class: kind }, make("code", {}, visible(token)), make("span", {}, percent(logprob)));
      item.title = `${kind ? `${kind}, ` : ""}log-probability ${number(logprob)}`;
      item.style.setProperty("--share", `${(100 * Math.exp(logprob)).toFixed(1)}%`);
      return item;
    });
    return make("section", {}, make("h3", {}, title), make("ol", {}, ...items));
  };
  find("top").replaceChildren(list("Patched", patched), list(`Unpatched ${sweep.patched}`, plain));
}
