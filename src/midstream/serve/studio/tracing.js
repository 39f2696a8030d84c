// The tab "Causal tracing": a form, the sweep's events as they come, and the top tokens of a chosen cell.

import { Scale, showBar } from "./colours.js";
import { copyOrSave, find, isWrong, make, note, number, percent, save, showReadout } from "./dom.js";
import { eventsOf } from "./events.js";
import { columnsOf, Heatmap, mean, nameOf, UNALIGNED } from "./heatmap.js";
import { checkPairs, fillPair, focusWrongPair, listenToPairs, readAll, refuse, showPairs, textsOfPairs } from "./pairs.js";
import { failure, respond, root } from "./server.js";
import { difference, visible } from "./tokens.js";

const SWEEPS = "v1/midstream/sweeps";
const FIELDS = ["sites", "metric", "direction"]; // those beside the pairs
const METRICS = { logit_diff: "logit difference", logprob: "log-probability", recovered: "recovered" };
const TOP = 10;
const HINT = "Point at a cell to read it. Click it, or press Enter, for its top tokens.";
const SEVERAL = "differs by pair";
let running = null; // the sweep whose events come
let sweep = null; // the one on the page
let asking = null; // aborts the question for a cell's top tokens

export function listen() {
  listenToPairs(() => ({
    metric: find("metric").value,
    patched: find("direction").value === "noising" ? "clean" : "corrupt",
    isByToken: !find("heads").checked,
  }));
  find("site-list").addEventListener("change", () => note("sites", ""));
  find("heads").addEventListener("change", () => {
    find("site-list").inert = find("heads").checked; // only attn_z has heads
    note("sites", "");
    showPairs();
  });
  for (const name of ["metric", "direction"]) {
    find(name).addEventListener("change", () => {
      note(name, "");
      showPairs();
    });
  }
  find("sweep").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  find("cancel").addEventListener("click", () => running?.controller.abort());
  find("example").addEventListener("click", fillExample);
  find("shown").addEventListener("change", () => sweep.view(find("shown").value === "mean" ? null : Number(find("shown").value)));
  find("copy").addEventListener("click", () => copyOrSave(sweep.python(), "sweep.py", "taking-note"));
  find("export").addEventListener("click", () => save(sweep.table(), "sweep.csv", "taking-note"));
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
  readAll();
}

function chosenSites() {
  return [...find("site-list").querySelectorAll("input:checked")].map((each) => each.value);
}

function fillExample() {
  fillPair({ clean: "The capital of France is", corrupt: "The capital of Italy is", answer: " Paris", foil: " Rome" });
  find("run").focus();
}

/** Check all fields; focus the first that is wrong. */
async function isComplete(body) {
  note("metric", "");
  note("direction", "");
  note("sites", body.sites.length ? "" : "Tick at least one site.", body.sites.length ? "" : "error");
  await checkPairs();
  return !focusWrong();
}

function focusWrong() {
  if (focusWrongPair()) return true;
  const wrong = FIELDS.find(isWrong);
  if (wrong) (wrong === "sites" ? find("site-list").querySelector("input") : find(wrong))?.focus();
  return wrong !== undefined;
}

// The sweep.

function bodyOfForm() {
  const byHead = find("heads").checked;
  return {
    ...textsOfPairs(),
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
    running = new Sweep(body);
    find("cancel").disabled = false;
    await running.run();
  } catch (error) {
    showError(error);
  } finally {
    find("run").disabled = false;
    find("cancel").disabled = true;
  }
}

function showError(error) {
  const names = error.param?.split(/[.[]/) ?? [];
  const field = FIELDS.find((each) => names.includes(each));
  if (field) note(field, error.message, "error");
  else if (!names.some((name) => refuse(name, error.message))) return showAlert(error.message);
  focusWrong();
}

const showAlert = (text) => (find("sweep-alert").textContent = text);

class Sweep {
  constructor(body) {
    this.body = body;
    this.controller = new AbortController();
    this.heatmaps = new Map();
    this.baselines = []; // by pair
    this.warnings = []; // about answers and foils
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
    sweep = this;
    find("figures").replaceChildren();
    find("sweep-warning").textContent = "";
    find("empty").hidden = true;
    find("legend").hidden = find("taking").hidden = find("shown").hidden = true;
    find("readout").replaceChildren();
    clearTop(HINT);
  }

  take(event) {
    const take = { start: this.begin, baselines: this.compare, cell: this.hold, summary: this.end };
    if (event.error) throw failure(event.error);
    take[event.event]?.call(this, event);
  }

  begin(outline) {
    this.outline = outline;
    this.cells = outline.cells;
    this.shown = outline.pairs.length > 1 ? null : 0;
    this.showChoice();
    const hands = { point: (place) => this.read(place), choose: (place) => this.choose(place) };
    for (const site of outline.grid.sites) {
      const heatmap = new Heatmap(site, outline, this.shown, hands);
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

  /** The choice of a pair, if there are several. */
  showChoice() {
    const { pairs } = this.outline;
    const titles = pairs.map(({ clean, corrupt }, pair) => [pair, `pair ${pair}: ${difference(clean, corrupt)}`]);
    const choices = [["mean", `mean of ${pairs.length} pairs`], ...titles];
    find("shown").replaceChildren(...choices.map(([value, text]) => make("option", { value }, text)));
    find("shown").hidden = pairs.length === 1;
  }

  /** Show a pair, or the mean over the pairs if `shown` is null. */
  view(shown) {
    this.shown = shown;
    asking?.abort();
    clearTop(HINT);
    for (const each of document.querySelectorAll(".cell.chosen")) each.classList.remove("chosen");
    for (const heatmap of this.heatmaps.values()) heatmap.view(shown);
    this.rescale();
    if (this.pointed) this.read(this.pointed);
  }

  compare(baselines) {
    this.baselines[baselines.pair] = baselines;
    this.warnings.push(...baselines.warnings);
    find("sweep-warning").textContent = this.warnings.join("\n");
    this.rescale();
  }

  get places() {
    return [...this.heatmaps.values()].flatMap(({ places }) => places.flat());
  }

  /** The scale of what is shown. The two prompts' values without a patch are its ends; with the mean, their means over the pairs. */
  rescale() {
    const metric = { logit_diff: ([a, b]) => a - b, logprob: ([a]) => a, recovered: null }[this.body.metric];
    const baselines = this.baselines.filter((each) => this.shown === null || this.shown === each.pair);
    this.scale = null;
    if (baselines.length) {
      const [low, high] = metric ? ["corrupt", "clean"].map((name) => mean(baselines.map((each) => metric(each[name])))) : [0, 1];
      const ends = this.isNoising ? [high, low] : [low, high];
      this.scale = new Scale(...ends, 1e3); // beyond a thousand nats the value is minus infinity
      for (const { cell } of this.places) if (typeof cell?.value === "number") this.scale.hold(cell.value);
    }
    this.recolour();
    if (this.isOver && this.scale) for (const heatmap of this.heatmaps.values()) heatmap.markQuiet(this.scale.centre, this.noiseFloor);
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
    const places = cells.map((cell) => this.heatmaps.get(cell.site).take(cell));
    const isWider = places.map(({ cell }) => typeof cell?.value === "number" && this.scale?.hold(cell.value)).includes(true);
    if (isWider) this.recolour();
    else {
      for (const place of places) this.heatmaps.get(place.site).colour(place, this.scale);
      this.legend();
    }
    if (places.includes(this.pointed)) this.read(this.pointed);
    if (!this.isOver) this.showProgress();
  }

  recolour() {
    for (const heatmap of this.heatmaps.values()) heatmap.recolour(this.scale);
    this.legend();
  }

  legend() {
    find("legend").hidden = !this.scale;
    if (!this.scale) return;
    const named = [[this.scale.centre, this.patched], [this.scale.reach, this.isNoising ? "corrupt" : "clean"]];
    showBar({ gradient: "gradient", ticks: "ticks" }, this.scale, METRICS[this.body.metric], named);
  }

  showProgress() {
    find("bar").max = this.cells || 1;
    find("bar").value = this.done;
    find("progress").textContent = `${this.done} of ${this.cells} cells`;
  }

  end({ noise_floor, cells, void: voids, seconds }) {
    this.isOver = true;
    this.noiseFloor = noise_floor;
    this.draw();
    this.rescale(); // a mean over some of the pairs may have widened it
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
    const inPython = (texts) => (texts.length > 1 ? JSON.stringify(texts, null, 4).replaceAll("\n", "\n    ") : JSON.stringify(texts[0]));
    const texts = [clean, corrupt, answer, ...(foil === null ? [] : [foil])].map(inPython);
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

  /** All cells of each pair as comma-separated values, with the columns of `SweepResult.to_dataframe`. */
  table() {
    const { grid, pairs } = this.outline;
    const head = [
      ...["pair", "site", "layer", ...(grid.heads ? ["head"] : []), "position", "token", "column"],
      ...["logprob", "foil_logprob", "value", "recovered", "void"],
    ];
    const rows = pairs.flatMap((_, pair) => {
      const columns = columnsOf(this.outline, pair);
      return this.places.map(({ site, layers, column, cells }) => {
        const { head, positions, token } = columns[column];
        const cell = cells[pair];
        return [
          ...[pair, site, layers.join(" "), ...(grid.heads ? [head] : [])],
          ...[positions?.join(" "), positions && token, grid.columns[grid.heads ? 0 : column].label],
          ...[cell?.logprobs?.[0], cell?.logprobs?.[1], cell?.value, cell?.recovered, positions ? cell?.void : UNALIGNED],
        ];
      });
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
      place.head === undefined ? ["Token", place.token === undefined ? SEVERAL : visible(place.token)] : ["Head", String(place.head)],
      ["Position", place.positions === undefined ? SEVERAL : (place.positions?.join(", ") ?? "–")],
    ];
    if (this.shown === null && cell) rows.push(["Pairs", `${cell.count} of ${this.outline.pairs.length}`]);
    if (cell?.void || place.positions === null) rows.push(["Void", cell?.void ?? `N${UNALIGNED.slice(1)}.`]);
    else if (!cell) rows.push(["Value", "not run yet"]);
    else {
      rows.push([METRICS[this.body.metric], number(cell.value)]);
      if (this.scale) rows.push(["Change", number(cell.value - this.scale.centre)]);
      if (this.body.metric !== "recovered") rows.push(["Recovered", number(cell.recovered)]);
      if (cell.standardError !== undefined) rows.push(["Standard error", number(cell.standardError)]);
      for (const [i, name] of ["answer", "foil"].entries()) {
        if (cell.logprobs?.[i] !== undefined) rows.push([`log p(${visible(this.body[name][cell.pair])})`, number(cell.logprobs[i])]);
      }
      if (place.isQuiet) rows.push(["Noise", "within the noise floor"]);
    }
    showReadout("readout", rows);
  }

  /** A pair's part of the body. */
  bodyOf(pair) {
    const { clean, corrupt, answer, foil } = this.body;
    return { clean: [clean[pair]], corrupt: [corrupt[pair]], answer: [answer[pair]], foil: foil && [foil[pair]] };
  }

  /** Ask for a cell's top tokens, by the same sweep of that cell alone. */
  async choose(place) {
    asking?.abort();
    const controller = (asking = new AbortController());
    for (const each of document.querySelectorAll(".cell.chosen")) each.classList.remove("chosen");
    place.element.classList.add("chosen");
    this.read(place);
    if (this.shown === null) return clearTop("Choose one pair above the heatmap to see its next tokens.");
    if (!place.cell || place.cell.void !== null) return clearTop("This cell has no run of its own.");
    clearTop(`Running layer ${place.layers.join(", ")} at ${nameOf(place)} again…`);
    const { head, positions } = place;
    const places = head === undefined ? { positions } : { heads: [head] };
    const one = { ...this.body, ...this.bodyOf(this.shown), sites: [place.site], layers: place.layers, ...places, top: TOP };
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
  const { answer, foil } = sweep.outline.pairs[sweep.shown];
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
