// The strings in which tokenizers store tokens, as text; and which tokens of two prompts correspond.

const byteOf = byteAlphabet();

/** Byte-level tokenizers store each byte as a printable character: a space is Ġ. This is GPT-2's table, by character. */
function byteAlphabet() {
  const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  const table = new Map();
  for (let byte = 0, next = 256; byte < 256; byte++) {
    table.set(String.fromCodePoint(printable(byte) ? byte : next++), byte);
  }
  return table;
}

/** The text of each token of a prompt, from the strings that /tokenize returns. */
export function textsOf(strings, prompt) {
  const bytes = strings.map(bytesOf);
  const whole = new TextDecoder().decode(Uint8Array.from(bytes.flat()));
  if (whole.includes(prompt.trim())) return bytes.map(textOf); // a chat template may trim it, and puts other text around it
  return strings.map((each) => (each.startsWith("<0x") ? textOf(bytesOf(each)) : each.replaceAll("▁", " ")));
}

function bytesOf(string) {
  const byte = string.match(/^<0x([0-9A-F]{2})>$/);
  if (byte) return [parseInt(byte[1], 16)]; // as SentencePiece stores them
  const bytes = [...string].map((each) => byteOf.get(each));
  return bytes.includes(undefined) ? [...new TextEncoder().encode(string.replaceAll("▁", " "))] : bytes;
}

/** Bytes as text; as hexadecimal numbers if they are a part of a character. */
function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
  } catch {
    return bytes.map((byte) => `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`).join("");
  }
}

/** A token's text with marks in place of white space and control characters. */
export function visible(text) {
  const marks = { " ": "␣", "\n": "↵", "\t": "⇥", "\u007f": "␡" };
  const mark = (each) => marks[each] ?? String.fromCharCode(0x2400 + each.charCodeAt(0));
  return text.replace(/[\u0000-\u0020\u007f]/g, mark) || "∅";
}

/** For each token of `base`, the corresponding position of `other`, or null. As `align` of midstream/sweeps/cells.py. */
export function aligned(base, other) {
  if (base.length === other.length) return base.map((_, i) => i);
  const shorter = Math.min(base.length, other.length);
  let prefix = 0;
  while (prefix < shorter && base[prefix] === other[prefix]) prefix++;
  let suffix = 0;
  while (suffix < shorter - prefix && base.at(-1 - suffix) === other.at(-1 - suffix)) suffix++;
  return base.map((_, i) => {
    if (i < prefix) return i;
    return i < base.length - suffix ? null : i + other.length - base.length;
  });
}

/** For each token of `base`: "same", "changed" (another token stands there) or "unaligned" (no position corresponds). */
export function comparison(base, other) {
  return aligned(base, other).map((position, i) => {
    if (position === null) return "unaligned";
    return base[i] === other[position] ? "same" : "changed";
  });
}

/** What differs between two prompts, given as texts of tokens: `France → Italy`. The first prompt's text if nothing does. */
export function difference(one, other) {
  const [a, b] = [[one, other], [other, one]].map(([base, rest]) => {
    const kinds = comparison(base, rest);
    return base.filter((_, i) => kinds[i] !== "same").join("").trim();
  });
  return a || b ? `${a || "∅"} → ${b || "∅"}` : one.join("");
}
