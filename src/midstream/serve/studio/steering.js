// The tab "Steering": one prompt with and without a vector added to the activations, side by side.

import { find, isWrong, make, note } from "./dom.js";
import { eventsOf } from "./events.js";
import { ask, failure, respond } from "./server.js";

const FIELDS = ["vector", "site", "layers", "scale", "prompt"];
let capabilities = null;
let model = null;
const running = { plain: null, steered: null }; // what aborts the stream of each column

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
  for (const name of ["vector", "site", "layers", "prompt"]) find(name).addEventListener("input", () => note(name, ""));
  for (const name of ["vector", "site"]) find(name).addEventListener("change", showWidths);
  find("upload").addEventListener("change", upload);
  find("make").addEventListener("click", makeVector);
  find("steer").addEventListener("submit", (event) => {
    event.preventDefault();
    generate(["plain", "steered"]);
  });
  find("stop").addEventListener("click", () => Object.values(running).forEach((each) => each?.abort()));
}

/** The server is there: list its sites and vectors, and see whether the model can chat. */
export async function connected(found, name) {
  capabilities = found;
  model = name;
  const before = find("site").value || "resid_post";
  find("site").replaceChildren(...Object.keys(found.sites).map((site) => make("option", { value: site }, site)));
  find("site").value = before;
  find("layers").value ||= String(Math.floor((found.num_layers * 5) / 8));
  await listVectors();
  await findChat();
}

async function listVectors(chosen = find("vector").value) {
  const { vectors } = await ask("v1/midstream/vectors");
  const options = Object.entries(vectors).map(([name, { width }]) => {
    const option = make("option", { value: name }, `${name} · ${width}`);
    option.dataset.width = width;
    return option;
  });
  find("vector").replaceChildren(...options);
  find("vector").disabled = !options.length;
  if (options.some((each) => each.value === chosen)) find("vector").value = chosen;
  note("vector", options.length ? "" : "The server has no vectors yet. Upload a file, or make one.");
  showWidths();
}

function showWidths() {
  const width = Number(find("vector").selectedOptions[0]?.dataset.width);
  const site = capabilities.sites[find("site").value];
  const isWrongWidth = width && site && width !== site.width;
  note("site", isWrongWidth ? `is ${site.width} wide, the vector ${width}` : "", isWrongWidth ? "error" : "");
}

/** A model without a chat template refuses to tokenize messages. */
async function findChat() {
  const messages = [{ role: "user", content: "Hello" }];
  const canChat = await respond("tokenize", { body: { messages } }).then(() => true, () => false);
  const chat = find("mode").querySelector("[value=chat]");
  chat.disabled = !canChat;
  if (!canChat) find("mode").value = "completion";
  find("mode").title = canChat ? "" : "The model has no chat template.";
}

async function upload() {
  const [file] = find("upload").files;
  if (!file) return;
  note("upload", `Sending ${file.name}…`);
  try {
    const response = await respond("v1/midstream/vectors", { body: file });
    const names = Object.keys((await response.json()).vectors);
    await listVectors(names[0]);
    note("upload", `Added ${names.join(", ")}.`, "good");
  } catch (error) {
    note("upload", error.message, "error");
  }
  find("upload").value = ""; // else the same file could not be chosen again
}

/** The difference of two prompts' activations after their last token, at the site and the first layer of the form. */
async function makeVector() {
  const [more, less, name] = ["more", "less", "name"].map((field) => find(field).value);
  const layers = layersOf(find("layers").value);
  if (!more || !less || !name) return note("making", "Enter two prompts and a name.", "error");
  if (layers === null || layers === "all") return note("making", "Write the layer to read into the field Layers, such as 5.", "error");
  const capture = { kind: "capture", site: find("site").value, layers: [layers[0]], positions: "last_prompt", dtype: "float32" };
  note("making", "Reading both prompts…");
  try {
    const [high, low] = await Promise.all([more, less].map((text) => rowOf(text, capture)));
    const file = safetensors(name, high.map((value, i) => value - low[i]));
    await respond("v1/midstream/vectors", { body: file });
    await listVectors(name);
    note("making", `Made ${name} from ${capture.site} of layer ${layers[0]}.`, "good");
  } catch (error) {
    note("making", error.message, "error");
  }
}

/** The row that a capture has of one prompt, as float32. */
async function rowOf(text, capture) {
  const body = { ...inputOf(text), model, max_tokens: 1, midstream: { plan: [capture], inline: true } };
  const [entry] = (await ask(routeOf(), { body })).midstream.captures;
  const bytes = Uint8Array.from(atob(entry.data), (each) => each.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** A safetensors file with one vector. */
function safetensors(name, values) {
  const about = { [name]: { dtype: "F32", shape: [values.length], data_offsets: [0, values.byteLength] } };
  const header = new TextEncoder().encode(JSON.stringify(about));
  return new Blob([new BigUint64Array([BigInt(header.length)]), header, values]);
}

const isChat = () => find("mode").value === "chat";
const routeOf = () => (isChat() ? "v1/chat/completions" : "v1/completions");
const inputOf = (text) => (isChat() ? { messages: [{ role: "user", content: text }] } : { prompt: text });

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
  if (!find("prompt").value) note("prompt", "Enter a prompt.", "error");
  if (layersOf(find("layers").value) === null) note("layers", "Write all, or layers such as 3, 5-6.", "error");
  const scale = find("scale-number").value;
  note("scale", scale === "" ? "Enter a number." : "", scale === "" ? "error" : "");
  const wrong = FIELDS.find(isWrong);
  if (wrong) find(wrong).focus();
  return !wrong;
}

function bodyOf(column) {
  const body = {
    model,
    ...inputOf(find("prompt").value),
    max_tokens: Number(find("tokens").value) || 64,
    temperature: Number(find("temperature").value) || 0,
    stream: true,
  };
  if (column === "steered") {
    const steer = {
      kind: "steer",
      site: find("site").value,
      layers: layersOf(find("layers").value),
      vector: find("vector").value,
      scale: Number(find("scale-number").value),
    };
    body.midstream = { plan: [steer] };
  }
  return [routeOf(), body];
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
  const [path, body] = bodyOf(column);
  const [steer] = body.midstream?.plan ?? [];
  const label = steer ? `${steer.vector} × ${String(steer.scale).replace("-", "−")}` : "";
  const say = (text) => (find(`${column}-note`).textContent = [label, text].filter(Boolean).join(" · "));
  try {
    const response = await respond(path, { body, signal: controller.signal });
    let ending = "";
    for await (const { data } of eventsOf(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw failure(chunk.error);
      const [choice] = chunk.choices ?? [];
      find(column).append(choice?.delta?.content ?? choice?.text ?? "");
      ending = choice?.finish_reason ?? ending;
    }
    say(ending === "length" ? "ended at the limit of tokens" : "complete");
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
