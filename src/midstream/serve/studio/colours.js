// Numbers as colours, and the bar that says which are which.

import { find, make, number } from "./dom.js";

/** White at the centre, blue above it, red below. */
export class Scale {
  /** `centre` and `reach` are on the scale. Values further than `limit` from the centre never widen it. */
  constructor(centre, reach, limit = Infinity) {
    this.centre = centre;
    this.reach = reach;
    this.limit = limit;
    this.half = Math.abs(reach - centre) || 1e-6;
    [this.low, this.high] = [Math.min(centre, reach), Math.max(centre, reach)]; // of all that has come
  }

  /** Widen the scale to hold a value. Returns whether it changed. */
  hold(value) {
    const distance = Math.abs(value - this.centre);
    if (distance > this.limit) return false;
    [this.low, this.high] = [Math.min(this.low, value), Math.max(this.high, value)];
    if (!(distance > this.half)) return false;
    this.half = distance;
    return true;
  }

  /** From -1, the deepest red, to 1, the deepest blue. */
  amount(value) {
    return Math.max(-1, Math.min(1, (value - this.centre) / this.half));
  }
}

/** Colour an element by a value; white without a value or a scale. */
export function paint(element, scale, value) {
  const amount = scale && typeof value === "number" ? scale.amount(value) : 0;
  element.style.setProperty("--amount", `${(100 * Math.abs(amount)).toFixed(1)}%`);
  element.classList.toggle("below", amount < 0);
  element.classList.toggle("deep", Math.abs(amount) > 0.82);
}

/**
 * Show the bar, from the lowest to the highest value that the scale holds. `ids`: of its gradient and its ticks. `named`: values with a
 * name, as `[value, name]`.
 */
export function showBar(ids, scale, title, named, inWords = (value) => number(value, 2)) {
  const { low, high, centre } = scale;
  const place = (value) => (100 * (value - low)) / (high - low || 1);
  const share = (value) => `${100 * Math.abs(scale.amount(value))}%`;
  const gradient = find(ids.gradient);
  for (const [name, value] of [["--below", share(low)], ["--above", share(high)], ["--white", `${place(centre)}%`]]) {
    gradient.style.setProperty(name, value);
  }
  const end = (value, colour) => `${inWords(value)}, ${value === centre ? "white" : colour}`;
  gradient.setAttribute("aria-label", `Colours: ${title} from ${end(low, "red")}, to ${end(high, "blue")}`);
  const marks = named.map(([value, name]) => [place(value), `${name} ${inWords(value)}`.trim()]);
  const ends = [[0, inWords(low)], [100, inWords(high)]];
  const room = (mark, end) => 3 + 2.3 * (end.length + mark.length / 2); // percent of the bar: a mark's text is centred
  const isFree = ([at, text]) => marks.every(([taken, mark]) => Math.abs(taken - at) > room(mark, text));
  const ticks = [...marks, ...ends.filter(isFree)];
  find(ids.ticks).replaceChildren(
    ...ticks.map(([place, text]) => {
      const tick = make("span", { class: place < 12 ? "first" : place > 88 ? "last" : "" }, text);
      tick.style.setProperty("--at", `${place}%`);
      return tick;
    }),
  );
}
