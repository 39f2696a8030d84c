// The server's named vectors: uploaded, made from two prompts, and listed in the tabs that use them.

import { find, make, note, significant } from "./dom.js";
import { requestOf } from "./generation.js";
import { ask, respond } from "./server.js";

let forms; // of the tabs: `{panel, list({vectors, saes}, chosen), place() => {site, layer}}`

export function listen(...given) {
  forms = given;
  find("upload").addEventListener("change", upload);
  find("make").addEventListener("click", makeVector);
}

/** List the server's vectors and SAEs in each form. `chosen`: the name of a vector to choose. Without vectors, open the form that makes one. */
export async function listSources(chosen) {
  const [{ vectors }, { saes }] = await Promise.all(["vectors", "saes"].map((each) => ask(`v1/midstream/${each}`)));
  for (const form of forms) form.list({ vectors, saes }, chosen);
  if (!Object.keys(vectors).length) find("making").open = true;
}

/** Fill a select with these options, and choose one, or else keep the choice. */
export function fillSelect(id, options, chosen) {
  const select = find(id);
  const before = chosen ?? select.value;
  select.replaceChildren(...options);
  const all = [...select.options];
  if (all.some((each) => each.value === before)) select.value = before;
  select.disabled = !all.length;
}

/** A vector or a site as an option that knows its width. */
export function optionOf(value, text, width) {
  return make("option", { value, "data-width": width }, text);
}

/** Fill a select with the model's sites. */
export function listSites(id, { sites }) {
  fillSelect(id, Object.entries(sites).map(([site, { width }]) => optionOf(site, site, width)), find(id).value || "resid_post");
}

/** Say at a form's site if the chosen vector is not as wide. */
export function checkWidth(vector, site) {
  const [own, width] = [vector, site].map((id) => Number(find(id).selectedOptions[0]?.dataset.width));
  const isWrong = own && width && own !== width;
  note(site, isWrong ? `is ${width} wide, the vector ${own}` : "", isWrong ? "error" : "");
}

async function upload() {
  const [file] = find("upload").files;
  if (!file) return;
  note("upload", `Sending ${file.name}…`);
  try {
    const response = await respond("v1/midstream/vectors", { body: file });
    const names = Object.keys((await response.json()).vectors);
    await listSources(names[0]);
    note("upload", `Added ${names.join(", ")}.`, "good");
  } catch (error) {
    note("upload", error.message, "error");
  }
  find("upload").value = ""; // else the same file could not be chosen again
}

/** The difference of two prompts' activations after their last token, at the site and the layer of the open form; its direction if asked. */
async function makeVector() {
  const [more, less, name] = ["more", "less", "name"].map((field) => find(field).value);
  const { site, layer } = forms.find(({ panel }) => !find(panel).hidden).place();
  if (!more || !less || !name) return note("making", "Enter two prompts and a name.", "error");
  if (layer === null) return note("making", "Write the layer to read into the form, such as 5.", "error");
  const capture = { kind: "capture", site, layers: [layer], positions: "last_prompt", dtype: "float32" };
  note("making", "Reading both prompts…");
  try {
    const [high, low] = await Promise.all([more, less].map((text) => rowOf(text, capture)));
    const difference = high.map((value, i) => value - low[i]);
    const length = Math.hypot(...difference);
    if (!length) return note("making", "Both prompts have the same activations here, so there is no vector between them.", "error");
    const file = safetensors(name, find("unit").checked ? difference.map((value) => value / length) : difference);
    await respond("v1/midstream/vectors", { body: file });
    await listSources(name);
    note("making", `Made ${name} from ${site} of layer ${layer}. The difference has length ${significant(length)}.`, "good");
  } catch (error) {
    note("making", error.message, "error");
  }
}

/** The row that a capture has of one prompt, as float32. */
async function rowOf(text, capture) {
  const [path, body] = requestOf(text, { max_tokens: 1, midstream: { plan: [capture], inline: true } });
  const [entry] = (await ask(path, { body })).midstream.captures;
  const bytes = Uint8Array.from(atob(entry.data), (each) => each.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** A safetensors file with one vector. */
function safetensors(name, values) {
  const about = { [name]: { dtype: "F32", shape: [values.length], data_offsets: [0, values.byteLength] } };
  const header = new TextEncoder().encode(JSON.stringify(about));
  return new Blob([new BigUint64Array([BigInt(header.length)]), header, values]);
}
