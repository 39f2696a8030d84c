// The tab "Scores": the tokens of a prompt and of what follows it, coloured by a probe's or a feature's score while they come.

import { paint, Scale, showBar } from "./colours.js";
import { copyOrSave, find, isWrong, make, note, showReadout, significant } from "./dom.js";
import { checkPrompt, chunksOf, endOf, inputOf, streamOf } from "./generation.js";
import { mean } from "./heatmap.js";
import { ask, failure, root } from "./server.js";
import { textsOf, visible } from "./tokens.js";
import { checkWidth, fillSelect, listSites, optionOf } from "./vectors.js";

const NAME = "score"; // the probe's
const OWN = ["score-by", "score-site", "score-layer", "score-feature", "score-bias", "score-activation", "score-above"];
const FIELDS = [...OWN, "prompt", "tokens"];
// The server's messages name these. The first that is found says the field.
const NAMED = {
  "sae is": "score-by",
  "Probe.weight": "score-by",
  "Probe.site": "score-site",
  "Probe.layer": "score-layer",
  "SAE.capture": "score-feature",
  "Probe.bias": "score-bias",
  "Probe.stop_above": "score-above",
  max_tokens: "tokens",
};
const REACH = { sigmoid: 1, tanh: 1 }; // the colours of these reach as far as their scores can
let shown = null; // the generation on the page

/** The form, for the vectors' own module. */
export const form = {
  panel: "scores",
  place() {
    const layer = find("score-layer").value;
    return { site: find("score-site").value, layer: layer === "" ? null : Number(layer) };
  },
  list({ vectors, saes }, chosen) {
    const groups = [
      ["Vectors", Object.entries(vectors).map(([name, { width }]) => optionOf(`vector:${name}`, `${name} · ${width}`, width))],
      ["Features of an SAE", Object.entries(saes).map(optionOfSae)],
    ];
    const filled = groups.filter(([, options]) => options.length);
    fillSelect("score-by", filled.map(([label, options]) => make("optgroup", { label }, ...options)), chosen && `vector:${chosen}`);
    showSource();
  },
};

function optionOfSae([name, { site, layer, features, width }]) {
  const option = optionOf(`sae:${name}`, `${name} · ${features}`, width);
  Object.assign(option.dataset, { site, layer, about: `${features} features of ${site} at layer ${layer}` });
  return option;
}

export function listen() {
  for (const name of OWN) find(name).addEventListener("input", () => note(name, ""));
  find("score-by").addEventListener("change", showSource);
  find("score-site").addEventListener("change", () => checkWidth("score-by", "score-site"));
  find("score").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  find("score-stop").addEventListener("click", () => shown?.controller.abort());
  find("score-copy").addEventListener("click", () => copyOrSave(shown.python(), "scores.py", "score-taking-note"));
  const strip = find("score-tokens");
  const tokenOf = ({ target }) => target.closest("[role=option]")?.token;
  for (const name of ["pointerover", "focusin"]) strip.addEventListener(name, (event) => tokenOf(event) && shown.read(tokenOf(event)));
  strip.addEventListener("click", (event) => tokenOf(event) && shown.focus(tokenOf(event)));
  strip.addEventListener("keydown", (event) => {
    if (tokenOf(event) && !event.altKey && !event.metaKey && shown.move(tokenOf(event), event.key)) event.preventDefault();
  });
}

/** The server is there: list its sites. */
export function connected(found) {
  listSites("score-site", found);
  find("score-layer").value ||= String(Math.floor((found.num_layers * 5) / 8));
}

/** The chosen vector or SAE: `{kind, name, site, layer, about}`, the last three of an SAE alone. */
function source() {
  const [option] = find("score-by").selectedOptions;
  const [, kind, name] = option?.value.match(/^(\w+):(.*)$/s) ?? [];
  return { kind, name, ...option?.dataset };
}

/** Show the fields of the chosen source. An SAE has a site and a layer of its own. */
function showSource() {
  const { kind, site, layer, about } = source();
  for (const field of find("score").querySelectorAll("[data-of]")) field.hidden = field.dataset.of !== (kind ?? "vector");
  for (const name of OWN) note(name, "");
  find("score-site").disabled = find("score-layer").disabled = kind === "sae";
  if (kind === "sae") [find("score-site").value, find("score-layer").value] = [site, layer];
  note("score-by", about ?? (kind ? "" : "The server has no vectors and no SAEs yet. Upload a file, or make a vector."));
  checkWidth("score-by", "score-site");
}

function isComplete() {
  const { kind } = source();
  if (!kind) note("score-by", "Choose a vector or an SAE.", "error");
  checkPrompt();
  for (const name of kind === "sae" ? ["score-feature", "score-above"] : ["score-layer", "score-bias", "score-above"]) {
    const { value, validity } = find(name);
    const isMissing = value === "" && ["score-feature", "score-layer"].includes(name);
    if (isMissing || validity.badInput) note(name, "Enter a number.", "error");
  }
  return !focusWrong();
}

function focusWrong() {
  const wrong = FIELDS.find(isWrong);
  if (wrong) find(wrong).focus();
  return wrong !== undefined;
}

/** The form's probe, as in a plan of a request. */
function probeOfForm() {
  const { kind, name } = source();
  const above = find("score-above").value;
  const common = { name: NAME, positions: "all", ...(above === "" ? {} : { stop_above: Number(above) }) };
  if (kind === "sae") return { kind, sae: name, do: "capture", features: Number(find("score-feature").value), ...common };
  const [bias, activation] = [Number(find("score-bias").value), find("score-activation").value];
  const shape = { ...(bias ? { bias } : {}), ...(activation ? { activation } : {}) };
  return { kind: "probe", ...form.place(), weight: name, ...shape, ...common };
}

async function generate() {
  find("score-alert").textContent = "";
  if (!isComplete()) return;
  shown?.controller.abort();
  const generation = (shown = new Generation(probeOfForm(), find("prompt").value));
  find("score-stop").disabled = false;
  try {
    await generation.run();
  } catch (error) {
    if (generation === shown) showError(error);
  } finally {
    if (generation === shown) find("score-stop").disabled = true;
  }
}

function showError(error) {
  const message = error.message.replace(/^interventions\[0\](: |\.)/, ""); // there is one alone
  const named = Object.keys(NAMED).find((each) => message.includes(each));
  if (!named) return (find("score-alert").textContent = message);
  note(NAMED[named], message, "error");
  focusWrong();
}

class Generation {
  constructor(probe, prompt) {
    this.probe = probe;
    this.prompt = prompt;
    this.input = inputOf(prompt);
    const logprobs = "messages" in this.input ? true : 0; // for the text of each token: an event may have several tokens
    this.request = streamOf({ midstream: { plan: [probe] }, return_token_ids: true, logprobs });
    this.controller = new AbortController();
    this.tokens = []; // `{text, position, isGenerated, element, score}`; no score has come if it is undefined, and null is not finite
    this.scale = new Scale(0, REACH[probe.activation] ?? 0);
  }

  async run() {
    const { signal } = this.controller;
    find("score-empty").hidden = find("score-tokens").hidden = true;
    find("score-legend").hidden = find("score-taking").hidden = true;
    find("score-tokens").replaceChildren();
    showReadout("score-readout", []);
    find("score-taking-note").textContent = find("score-totals").textContent = "";
    find("score-progress").textContent = "Generating…";
    find("score-progress").setAttribute("aria-busy", "true"); // screen readers announce the end, not every token
    this.isRunning = true;
    let words = "failed";
    try {
      const { token_strs } = await ask("tokenize", { body: { ...this.input, return_token_strs: true }, signal });
      for (const text of textsOf(token_strs, this.prompt)) this.append(text, false);
      find("score-tokens").hidden = false;
      for await (const chunk of chunksOf(this.request, signal)) this.take(chunk);
      words = this.end();
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      words = "stopped";
    } finally {
      this.isRunning = false;
      if (this === shown) this.close(words);
    }
  }

  take({ choices, midstream, prompt_token_ids }) {
    const [choice] = choices ?? [];
    const prompt = prompt_token_ids ?? choice?.prompt_token_ids; // of a chat, or of a text
    if (prompt && prompt.length !== this.tokens.length) {
      throw failure(`The prompt has ${prompt.length} tokens, and /tokenize gave ${this.tokens.length}.`);
    }
    const texts = choice?.logprobs?.tokens ?? choice?.logprobs?.content?.map(({ token }) => token) ?? [];
    choice?.token_ids?.forEach((_, i) => this.append(texts[i] ?? "", true));
    const { positions = [], scores = [] } = midstream?.scores?.[NAME] ?? {};
    if (positions.length) this.hold(positions.map((position, i) => [this.tokens[position], scores[i][0]]));
    this.reason = choice?.finish_reason ?? this.reason;
    this.stop = choice?.stop_reason ?? this.stop;
  }

  append(text, isGenerated) {
    const position = this.tokens.length;
    const isFirst = isGenerated && !this.tokens.at(-1)?.isGenerated;
    const element = make("span", { role: "option", tabindex: position ? -1 : 0, class: `score unscored${isFirst ? " begins" : ""}` });
    element.textContent = text.replaceAll("\n", "↵\n") || visible("");
    const token = (element.token = { text, position, isGenerated, element, score: undefined });
    this.tokens.push(token);
    this.describe(token);
    find("score-tokens").append(element);
  }

  /** Take scores, as `[token, score]`. The last event has all of them again. */
  hold(scores) {
    let isWider = false;
    const fresh = scores.filter(([token]) => token && token.score === undefined);
    for (const [token, score] of fresh) {
      token.score = score;
      token.element.classList.remove("unscored");
      token.element.classList.toggle("void", score === null);
      this.describe(token);
      // In many models the first token's activations are far larger than all others: it would leave the others white.
      if (score !== null && token.position > 0) isWider = this.scale.hold(score) || isWider;
    }
    for (const { element, score } of isWider ? this.tokens : fresh.map(([token]) => token)) paint(element, this.scale, score);
    this.showTotals();
    if (fresh.some(([token]) => token === this.pointed)) this.read(this.pointed);
  }

  showTotals() {
    const scores = this.tokens.map(({ score }) => score).filter((score) => typeof score === "number");
    if (!scores.length) return;
    const most = scores.reduce((one, other) => Math.max(one, other));
    find("score-totals").textContent = `max ${significant(most)} · mean ${significant(mean(scores))}`;
    find("score-legend").hidden = find("score-taking").hidden = false;
    showBar({ gradient: "score-gradient", ticks: "score-ticks" }, this.scale, "score", [[0, ""]], significant);
  }

  /** How the generation has ended, in words. */
  end() {
    const [, name] = String(this.stop ?? "").match(/^probe:(.*)$/s) ?? [];
    if (name === undefined) return endOf(this.reason);
    if (name !== NAME) return `ended by the probe ${name} of the server`;
    const last = this.tokens.findLast(({ score }) => score !== undefined);
    return `ended: the score of ${visible(last.text)} at position ${last.position} is above ${significant(this.probe.stop_above)}`;
  }

  close(words) {
    const count = this.tokens.filter(({ isGenerated }) => isGenerated).length;
    find("score-progress").textContent = `${count} ${count === 1 ? "token" : "tokens"} generated · ${words}`;
    find("score-progress").setAttribute("aria-busy", "false");
    for (const token of this.tokens) this.describe(token);
    if (this.pointed) this.read(this.pointed);
  }

  inWords({ score }) {
    if (score === undefined) return this.isRunning ? "not yet" : "none";
    return score === null ? "not finite" : significant(score);
  }

  describe(token) {
    token.element.setAttribute("aria-label", `${visible(token.text)}, position ${token.position}: ${this.inWords(token)}`);
  }

  /** Show a token's numbers. */
  read(token) {
    this.pointed?.element.removeAttribute("aria-selected");
    this.pointed = token;
    token.element.setAttribute("aria-selected", "true");
    const part = token.isGenerated ? "generated" : "prompt";
    const rows = [["Token", visible(token.text)], ["Position", String(token.position)], ["Part", part], ["Score", this.inWords(token)]];
    showReadout("score-readout", rows);
  }

  move({ position, element }, key) {
    const last = this.tokens.length - 1;
    const steps = { ArrowLeft: position - 1, ArrowRight: position + 1, Home: 0, End: last };
    const down = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (!(key in steps) && !down) return false;
    const token = down ? this.nextLine(element, down) : this.tokens[steps[key]];
    if (token) this.focus(token);
    return true;
  }

  /** The token above (-1) or below (1) on the page. */
  nextLine({ offsetTop, offsetLeft }, down) {
    const others = this.tokens.filter(({ element }) => down * (element.offsetTop - offsetTop) > 0);
    const aside = ({ element }) => Math.abs(element.offsetLeft - offsetLeft);
    others.sort((one, other) => down * (one.element.offsetTop - other.element.offsetTop) || aside(one) - aside(other));
    return others[0];
  }

  focus(token) {
    for (const { element } of this.tokens) element.tabIndex = element === token.element ? 0 : -1;
    token.element.focus();
  }

  /** The same in Python. A JSON string is one of Python's, too. */
  python() {
    const { kind, sae, do: method, site, ...given } = this.probe;
    const fields = Object.entries(given).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
    const isSae = kind === "sae";
    const probe = isSae ? `model.saes[${JSON.stringify(sae)}].${method}(` : `Probe(${JSON.stringify(site)}, `;
    const [, { max_tokens, temperature }] = this.request;
    const prompt = JSON.stringify(this.input.messages ?? this.input.prompt);
    return `from midstream import ${isSae ? "" : "Probe, "}Remote

model = Remote(${JSON.stringify(root.href.replace(/\/$/, ""))})  # api_key=, if the server needs one
probe = ${probe}${fields.join(", ")})
(output,) = model.generate(
    ${prompt},
    plan=probe,
    max_tokens=${max_tokens},
    temperature=${temperature},
)
ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
for position, (score,) in zip(output.scores.positions["${NAME}"], output.scores["${NAME}"].tolist()):
    print(f"{score:10.3f}  {model.tokenizer.decode(ids[position])!r}")
`;
  }
}
