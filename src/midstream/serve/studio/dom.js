// Small helpers for the page's elements. All text goes in as text, never as HTML.

/** The element of an id. */
export const find = (id) => document.getElementById(id);

/** A new element with these attributes and children; texts among the children stay texts. */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Write the note below a field; `kind` is "error", "good" or "". An error also marks the field. */
export function note(id, text, kind = "") {
  const element = find(`${id}-note`);
  element.textContent = text;
  element.className = `note ${kind}`;
  find(id).toggleAttribute("aria-invalid", kind === "error");
  if (kind === "error") find(id).setAttribute("aria-invalid", "true");
}

/** Whether a field's note is an error. */
export const isWrong = (id) => find(id).hasAttribute("aria-invalid");

/** A number with so many digits behind the point, and a minus sign instead of a hyphen. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return value <= LOWEST ? "−∞" : fixed(value, digits);
}

function fixed(value, digits) {
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

/** A number with four significant digits, and at most six behind the point. */
export function significant(value) {
  const digits = 3 - Math.floor(Math.log10(Math.abs(value) || 1e3));
  return fixed(value, Math.max(0, Math.min(6, digits)));
}

/** A probability in percent. */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value < 0.05 ? "<0.1%" : `${value.toFixed(1)}%`;
}

/** Fill a list of names and values. */
export function showReadout(id, rows) {
  find(id).replaceChildren(...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

/** Put a text on the clipboard, or into a file: a browser keeps the clipboard from pages of plain http. The note says which. */
export async function copyOrSave(text, name, noteId) {
  try {
    await navigator.clipboard.writeText(text);
    find(noteId).textContent = "Copied.";
  } catch {
    save(text, name, noteId);
  }
}

/** Save a text as a file. */
export function save(text, name, noteId) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text])), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
  find(noteId).textContent = `Saved as ${name}.`;
}

const LOWEST = -9999; // midstream's stand-in for minus infinity, which JSON lacks
