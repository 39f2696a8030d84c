// The tab "Steering": one prompt with and without a vector added to the activations, side by side.

import { find, isWrong, note } from "./dom.js";
import { checkPrompt, chunksOf, endOf, streamOf } from "./generation.js";
import { checkWidth, fillSelect, listSites, optionOf } from "./vectors.js";

const FIELDS = ["vector", "site", "layers", "scale", "prompt"];
const running = { plain: null, steered: null }; // what aborts the stream of each column

/** The form, for the vectors' own module. */
export const form = {
  panel: "steering",
  place() {
    const layers = layersOf(find("layers").value);
    return { site: find("site").value, layer: layers === "all" ? null : (layers?.[0] ?? null) };
  },
  list({ vectors }, chosen) {
    const options = Object.entries(vectors).map(([name, { width }]) => optionOf(name, `${name} · ${width}`, width));
    fillSelect("vector", options, chosen);
    note("vector", options.length ? "" : "The server has no vectors yet. Upload a file, or make one.");
    checkWidth("vector", "site");
  },
};

export function listen() {
  find("scale").addEventListener("input", () => (find("scale-number").value = find("scale").value));
  find("scale-number").addEventListener("input", () => {
    const value = Number(find("scale-number").value);
    widenSlider(value);
    find("scale").value = value;
  });
  // A new scale steers the text that is on the page anew. The unsteered text stays.
  for (const name of ["scale", "scale-number"]) {
    find(name).addEventListener("change", () => find("steered").textContent && generate(["steered"]));
  }
  for (const name of ["vector", "site", "layers"]) find(name).addEventListener("input", () => note(name, ""));
  for (const name of ["vector", "site"]) find(name).addEventListener("change", () => checkWidth("vector", "site"));
  find("steer").addEventListener("submit", (event) => {
    event.preventDefault();
    generate(["plain", "steered"]);
  });
  find("stop").addEventListener("click", () => Object.values(running).forEach((each) => each?.abort()));
}

/** The server is there: list its sites. */
export function connected(found) {
  listSites("site", found);
  find("layers").value ||= String(Math.floor((found.num_layers * 5) / 8));
}

function widenSlider(value) {
  const reach = Math.max(Number(find("scale").max), Math.abs(value));
  find("scale").min = -reach;
  find("scale").max = reach;
}

/** `"all"`, or the layers of a text such as `3, 5-6`; null if it is neither. */
export function layersOf(text) {
  if (text.trim() === "all") return "all";
  const found = [];
  for (const part of text.split(",")) {
    const range = part.trim().match(/^(\d+)(?:\s*[-–]\s*(\d+))?$/);
    if (!range) return null;
    for (let layer = Number(range[1]), last = Number(range[2] ?? range[1]); layer <= last && found.length < 1000; layer++) {
      found.push(layer);
    }
  }
  return found.length ? found : null;
}

function isComplete() {
  if (!find("vector").value) note("vector", "Choose a vector, or upload one.", "error");
  checkPrompt();
  if (layersOf(find("layers").value) === null) note("layers", "Write all, or layers such as 3, 5-6.", "error");
  const scale = find("scale-number").value;
  note("scale", scale === "" ? "Enter a number." : "", scale === "" ? "error" : "");
  const wrong = FIELDS.find(isWrong);
  if (wrong) find(wrong).focus();
  return !wrong;
}

/** What is done to the activations for a column: a plan's steer, or null. */
function steerOf(column) {
  if (column === "plain") return null;
  const [site, vector] = ["site", "vector"].map((each) => find(each).value);
  return { kind: "steer", site, layers: layersOf(find("layers").value), vector, scale: Number(find("scale-number").value) };
}

async function generate(columns) {
  find("steer-alert").textContent = "";
  if (!isComplete()) return;
  await Promise.all(columns.map(stream));
}

async function stream(column) {
  running[column]?.abort();
  const controller = (running[column] = new AbortController());
  find("stop").disabled = false;
  find(column).textContent = "";
  find(`${column}-note`).className = "note";
  find(`${column}-note`).textContent = "…";
  const steer = steerOf(column);
  const label = steer ? `${steer.vector} × ${String(steer.scale).replace("-", "−")}` : "";
  const say = (text) => (find(`${column}-note`).textContent = [label, text].filter(Boolean).join(" · "));
  try {
    let ending = "";
    for await (const { choices } of chunksOf(streamOf(steer && { midstream: { plan: [steer] } }), controller.signal)) {
      const [choice] = choices ?? [];
      find(column).append(choice?.delta?.content ?? choice?.text ?? "");
      ending = choice?.finish_reason ?? ending;
    }
    say(endOf(ending));
  } catch (error) {
    if (running[column] !== controller) return; // a newer stream has taken the column
    if (error.name === "AbortError") return say("stopped");
    say("failed");
    showError(error, column);
  } finally {
    if (running[column] === controller) running[column] = null;
    find("stop").disabled = !Object.values(running).some(Boolean);
  }
}

/** midstream's messages name the field of the plan, such as Steer.layers. */
function showError(error, column) {
  const field = column === "steered" && FIELDS.find((each) => error.message.includes(`Steer.${each}`));
  if (field) note(field, error.message, "error");
  else find("steer-alert").textContent = error.message;
}
