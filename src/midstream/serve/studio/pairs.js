// The form's list of pairs: a clean and a corrupt prompt, an answer and a foil each. The fields show the chosen pair, and all pairs are
// checked while they are typed. Pairs are counted from 0, as in Python.

import { find, make, note } from "./dom.js";
import { settled, tokenize } from "./server.js";
import { comparison, difference, textsOf, visible } from "./tokens.js";

const KEPT = "midstream-pairs"; // the texts, kept until the browser tab is closed
const PROMPTS = ["clean", "corrupt"];
const TOKENS = ["answer", "foil"];
const NAMES = { clean: "clean prompt", corrupt: "corrupt prompt", answer: "answer", foil: "foil" };
const FIELDS = [...PROMPTS, ...TOKENS];
const pairs = [];
let chosen; // the pair in the fields
let rules; // returns `{metric, patched, isByToken}` of the rest of the form

class Pair {
  constructor(texts = {}) {
    this.texts = { clean: "", corrupt: "", answer: "", foil: "", ...texts };
    this.found = {}; // by field, what the tokenizer makes of its text: `{text, ids, texts}` or `{text, error}`
    this.refused = {}; // by field, why the server refused it
    this.isAsked = false; // whether a sweep was asked for. Only then is a missing text an error
    this.pick = make("button", { type: "button", class: "pick" });
    this.remove = make("button", { type: "button", class: "remove" }, "×");
    this.row = make("li", {}, this.pick, this.remove);
    this.pick.addEventListener("click", () => choose(this));
    this.remove.addEventListener("click", () => removePair(this));
  }

  /** What the tokenizer makes of a field's present text, or undefined. */
  read(name) {
    const found = this.found[name];
    return found?.text === this.texts[name] ? found : undefined;
  }
}

export function listenToPairs(rulesOfForm) {
  rules = rulesOfForm;
  const reading = settled(readAll);
  const write = (name, text) => {
    chosen.texts[name] = text;
    delete chosen.refused[name];
    keep();
    showPairs();
  };
  for (const name of FIELDS) {
    find(name).addEventListener("input", () => {
      write(name, find(name).value);
      reading();
    });
  }
  for (const name of TOKENS) {
    find(`${name}-space`).addEventListener("click", () => {
      write(name, ` ${chosen.texts[name]}`);
      find(name).focus();
      readAll();
    });
  }
  find("add").addEventListener("click", () => {
    addPair();
    find("clean").focus();
  });
  for (const texts of JSON.parse(sessionStorage.getItem(KEPT) ?? "[{}]")) addPair(texts);
  choose(pairs[0]);
}

// The list.

function addPair(texts) {
  const pair = new Pair(texts);
  pairs.push(pair);
  find("pairs").append(pair.row);
  choose(pair);
  keep();
}

function removePair(pair) {
  const index = pairs.indexOf(pair);
  pairs.splice(index, 1);
  pair.row.remove();
  choose(pair === chosen ? (pairs[index] ?? pairs.at(-1)) : chosen);
  (pairs.length > 1 ? chosen.pick : find("add")).focus();
  keep();
}

function choose(pair) {
  chosen = pair;
  showPairs();
  chosen.row.scrollIntoView({ block: "nearest" });
}

function keep() {
  sessionStorage.setItem(KEPT, JSON.stringify(pairs.map(({ texts }) => texts)));
}

/** The pairs' part of a sweep's body. */
export function textsOfPairs() {
  const [clean, corrupt, answer, foil] = FIELDS.map((name) => pairs.map(({ texts }) => texts[name]));
  return { clean, corrupt, answer, foil: foil.some(Boolean) ? foil : null };
}

/** Write texts into the chosen pair. */
export function fillPair(texts) {
  Object.assign(chosen.texts, texts);
  keep();
  showPairs();
  readAll();
}

// What the tokenizer makes of the texts.

/** Read all texts that have not been read. */
export async function readAll(signal) {
  await Promise.all(pairs.flatMap((pair) => FIELDS.map((name) => read(pair, name, signal))));
}

async function read(pair, name, signal) {
  const text = pair.texts[name];
  const known = pair.read(name);
  if (!text || (known && !known.error)) return;
  let found;
  try {
    const { ids, strings } = await tokenize(text, { special: PROMPTS.includes(name), signal });
    found = { text, ids, texts: textsOf(strings, text) };
    if (TOKENS.includes(name) && ids.length !== 1 && !text.startsWith(" ")) {
      const spaced = await tokenize(` ${text}`, { special: false, signal });
      found.needsSpace = spaced.ids.length === 1;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    found = { text, error: error.message };
  }
  if (pair.texts[name] === text) pair.found[name] = found;
  showPairs();
}

/** Check all pairs for a sweep. */
export async function checkPairs() {
  for (const pair of pairs) [pair.isAsked, pair.refused] = [true, {}];
  showPairs();
  await readAll();
}

/** Show why the server refused a field of the only pair. Returns false if there are several: the server does not say which one it is. */
export function refuse(name, message) {
  if (pairs.length > 1 || !FIELDS.includes(name)) return false;
  pairs[0].refused[name] = message;
  showPairs();
  return true;
}

/** Move the focus to the first wrong field, if there is one. Returns whether there is. */
export function focusWrongPair() {
  const wrong = pairs.find((pair) => errorsOf(pair).length);
  if (!wrong) return false;
  choose(wrong);
  find(errorsOf(wrong)[0].name).focus();
  return true;
}

// What is wrong with them.

const errorsOf = (pair) =>
  FIELDS.map((name) => [name, ...noteOf(pair, name)]).flatMap(([name, text, kind]) => (kind === "error" ? [{ name, text }] : []));

/** The note at a field: its text and its kind. */
function noteOf(pair, name) {
  if (pair.refused[name]) return [pair.refused[name], "error"];
  if (!pair.texts[name]) {
    const missing = pair.isAsked ? missingOf(name) : "";
    return [missing, missing && "error"];
  }
  const found = pair.read(name);
  if (!found) return ["", ""];
  return PROMPTS.includes(name) ? noteOfPrompt(pair, name, found) : noteOfToken(pair, name, found);
}

/** Whether every pair needs a foil. */
const needsFoil = () => rules().metric === "logit_diff" || (pairs.length > 1 && pairs.some(({ texts }) => texts.foil));

function missingOf(name) {
  if (PROMPTS.includes(name)) return "Enter a prompt.";
  if (name === "answer") return "Enter an answer of one token.";
  if (rules().metric === "logit_diff") return "The logit difference needs a foil.";
  return needsFoil() ? "Another pair has a foil, so this one needs a foil, too." : "";
}

/** With columns of tokens, all patched prompts need one length, as in `columns` of midstream/sweeps/cells.py. */
function noteOfPrompt(pair, name, { ids, error }) {
  if (error) return [error, "error"];
  const { patched, isByToken } = rules();
  const first = pairs[0].read(name)?.ids?.length ?? ids.length;
  if (isByToken && name === patched && ids.length !== first) {
    return [`${ids.length} tokens, and pair 0 has ${first}. A sweep over tokens needs ${name} prompts of one length.`, "error"];
  }
  const alone = kindsOf(pair, name).filter((kind) => kind === "unaligned").length;
  return [`${ids.length} tokens${alone ? `, ${alone} without a counterpart` : ""}`, ""];
}

function noteOfToken(pair, name, { ids, texts, error }) {
  if (error) return [`Cannot be checked: ${error}`, ""]; // the sweep checks it again
  if (ids.length !== 1) return [`${ids.length} tokens: ${texts.map(visible).join(" | ")}. One is needed.`, "error"];
  const answer = pair.read("answer")?.ids;
  if (name === "foil" && answer?.length === 1 && answer[0] === ids[0]) {
    return ["This is the same token as the answer. Enter another one.", "error"];
  }
  return [`${visible(texts[0])} is token ${ids[0]}`, "good"];
}

function kindsOf(pair, name) {
  const [own, other] = [name, ...PROMPTS.filter((each) => each !== name)].map((each) => pair.read(each)?.ids);
  return own && other ? comparison(own, other) : [];
}

// Showing them.

/** Show the list and the chosen pair, with what is wrong. */
export function showPairs() {
  find("pairs").hidden = pairs.length === 1;
  for (const [number, pair] of pairs.entries()) showRow(pair, number);
  const wrong = pairs.flatMap((pair, number) =>
    errorsOf(pair).map(({ name, text }) => `Pair ${number}, ${NAMES[name]}: ${text}`),
  );
  const text = pairs.length > 1 ? wrong.join("\n") : "";
  if (find("pairs-note").textContent !== text) find("pairs-note").textContent = text; // a screen reader reads it once
  for (const name of FIELDS) {
    if (find(name).value !== chosen.texts[name]) find(name).value = chosen.texts[name];
    note(name, ...noteOf(chosen, name));
  }
  find("foil-need").textContent = needsFoil() ? "required" : "optional";
  for (const name of PROMPTS) showChips(name);
  for (const name of TOKENS) find(`${name}-space`).hidden = !chosen.read(name)?.needsSpace;
}

function showRow(pair, number) {
  const { clean, corrupt, answer, foil } = pair.texts;
  const [one, other] = PROMPTS.map((name) => pair.read(name)?.texts);
  const title = one && other ? difference(one, other) : clean || corrupt || "empty";
  const tokens = [answer, foil].map((text) => text.trim()).filter(Boolean).join(" / ");
  pair.pick.replaceChildren(...[String(number), title, tokens].map((text) => make("span", {}, text)));
  pair.pick.setAttribute("aria-label", `Pair ${number}: ${title}`);
  pair.pick.setAttribute("aria-current", pair === chosen);
  pair.pick.classList.toggle("error", errorsOf(pair).length > 0);
  pair.remove.setAttribute("aria-label", `Remove pair ${number}`);
}

function showChips(name) {
  const { ids, texts = [] } = chosen.read(name) ?? {};
  const kinds = kindsOf(chosen, name);
  find(`${name}-tokens`).replaceChildren(
    ...texts.map((text, i) => {
      const kind = kinds[i] ?? "same";
      const chip = make("li", { class: kind, title: `position ${i}, token ${ids[i]}` }, visible(text));
      if (kind === "changed") chip.append(make("span", { class: "unseen" }, " (differs)"));
      if (kind === "unaligned") chip.append(make("span", { class: "unseen" }, " (no counterpart)"));
      return chip;
    }),
  );
}
