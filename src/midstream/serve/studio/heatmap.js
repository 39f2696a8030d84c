// The figure of one site: layers as rows, the first at the bottom, tokens or heads as columns, and a cell for each pair of them. It is an
// ARIA grid: one cell takes part in the tab order, and the arrow keys move between cells.

import { make, number } from "./dom.js";
import { visible } from "./tokens.js";

/** Colours of values: white where the patch changes nothing, blue above that, red below. */
export class Scale {
  /** `centre`: the metric of the patched prompt without a patch. `reach`: the other prompt's. */
  constructor(centre, reach) {
    this.centre = centre;
    this.reach = reach;
    this.half = Math.abs(reach - centre) || 1e-6;
    [this.low, this.high] = [Math.min(centre, reach), Math.max(centre, reach)]; // of all that has come
  }

  /** Widen the scale to hold a value. Returns whether it changed. */
  hold(value) {
    const distance = Math.abs(value - this.centre);
    if (distance > 1e3) return false; // beyond a thousand nats the value is minus infinity
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

/** What the columns of a figure stand for: groups of tokens, or heads. */
export function columnsOf({ heads, columns }) {
  if (!heads) return columns;
  return heads.map((head) => ({ ...columns[0], label: `H${head}`, head }));
}

/** The column of a cell, for people. */
export const nameOf = ({ label, head }) => (head === undefined ? visible(label) : `head ${head}`);

export class Heatmap {
  /**
   * `outline`: the sweep's "start". `changed`: for each column, whether the two prompts differ there.
   * `point(place)` is called when a cell is pointed at or focused, and `choose(place)` when it is clicked or Enter is pressed.
   */
  constructor(site, outline, changed, { point, choose }) {
    const { sites, layers, heads } = outline.grid;
    const columns = columnsOf(outline.grid);
    this.site = site;
    this.places = []; // by row, then by column
    this.grid = make("div", {
      role: "grid",
      "aria-label": `${site}: layers by ${heads ? "heads" : "tokens"}`,
      "aria-rowcount": layers.length + 1,
      "aria-colcount": columns.length + 1,
      "aria-readonly": "true",
    });
    this.grid.style.setProperty("--columns", columns.length);
    const isFlat = layers.length > 24;
    const isLow = layers.length > 12 || sites.length > 1;
    const isBare = isFlat || columns.length > 16; // no room for numbers
    this.grid.className = `grid${isBare ? " bare" : ""}${isFlat ? " flat" : isLow ? " low" : ""}`;
    for (const [row, group] of layers.entries()) this.addRow(row, group, columns, layers.length - row);
    this.addLabels(columns, changed, isBare);
    this.places[0][0].element.tabIndex = 0;
    this.listen(point, choose);
    this.element = make("figure", {}, make("figcaption", {}, site), make("div", { class: "scroll" }, this.grid));
  }

  /** `fromTop`: which row of the figure it is, from 1. */
  addRow(row, group, columns, fromTop) {
    const name = group.length > 1 ? `${group[0]}–${group.at(-1)}` : String(group[0]);
    const line = make("div", { role: "row", "aria-rowindex": fromTop });
    line.append(make("span", { role: "rowheader", class: "layer", "aria-label": `layer ${name}` }, name));
    this.places.push([]);
    for (const [column, { label, positions, head }] of columns.entries()) {
      const element = make("span", { role: "gridcell", tabindex: -1, "aria-colindex": column + 2, class: "cell pending" });
      const place = { site: this.site, row, column, layers: group, label, head, positions: positions[0], element, cell: null };
      element.place = place;
      this.places[row].push(place);
      this.describe(place);
      line.append(element);
    }
    this.grid.prepend(line);
  }

  addLabels(columns, changed, isBare) {
    const line = make("div", { role: "row", class: "tokens", "aria-rowindex": this.places.length + 1 });
    line.append(make("span", { role: "rowheader", class: "layer", "aria-label": "token" }));
    const isUpright = isBare || columns.some(({ label }) => label.length > (columns.length > 10 ? 5 : 8));
    line.classList.toggle("upright", isUpright);
    for (const [column, { label, positions }] of columns.entries()) {
      const kind = positions[0] === null ? " unaligned" : changed[column] ? " changed" : "";
      line.append(make("span", { role: "columnheader", class: `label${kind}`, "aria-colindex": column + 2 }, visible(label)));
    }
    this.grid.append(line);
  }

  /** Show a cell that has been run. */
  show(cell, scale) {
    const place = this.places[cell.index[0]][cell.index[1]];
    place.cell = cell;
    place.element.classList.remove("pending");
    place.element.classList.toggle("void", cell.void !== null);
    if (cell.void === null) place.element.textContent = number(cell.value, Math.abs(cell.value) < 9.995 ? 2 : 1);
    this.colour(place, scale);
    this.describe(place);
  }

  /** Colour all cells anew. */
  recolour(scale) {
    for (const place of this.places.flat()) this.colour(place, scale);
  }

  colour({ element, cell }, scale) {
    if (!scale || cell?.void !== null || cell.value === null) return;
    const amount = scale.amount(cell.value);
    element.style.setProperty("--amount", `${(100 * Math.abs(amount)).toFixed(1)}%`);
    element.classList.toggle("below", amount < 0);
    element.classList.toggle("deep", Math.abs(amount) > 0.62);
  }

  /** Mark the cells whose value is no further than `floor` from `centre`. */
  markQuiet(centre, floor) {
    for (const place of this.places.flat()) {
      const value = place.cell?.value ?? null;
      place.isQuiet = value !== null && Math.abs(value - centre) <= floor;
      place.element.classList.toggle("quiet", place.isQuiet);
      this.describe(place);
    }
  }

  describe(place) {
    const { element, layers, cell, isQuiet, positions } = place;
    const where = `layer ${layers.join(", ")}, ${nameOf(place)}`;
    let value = positions === null ? "void: no token of the other prompt corresponds" : "not run";
    if (cell) value = cell.void !== null ? `void: ${cell.void}` : number(cell.value);
    element.setAttribute("aria-label", `${where}: ${value}${isQuiet ? ", within the noise floor" : ""}`);
    element.classList.toggle("void", positions === null || (cell?.void ?? null) !== null);
    if (cell?.void) element.title = cell.void;
  }

  listen(point, choose) {
    const placeOf = (event) => event.target.closest("[role=gridcell]")?.place;
    const pointing = (event) => placeOf(event) && point(placeOf(event));
    this.grid.addEventListener("pointerover", pointing);
    this.grid.addEventListener("focusin", pointing);
    this.grid.addEventListener("click", (event) => {
      const place = placeOf(event);
      if (!place) return;
      this.focus(place);
      choose(place);
    });
    this.grid.addEventListener("keydown", (event) => {
      const place = placeOf(event);
      if (!place || event.altKey || event.metaKey) return;
      if (event.key === "Enter" || event.key === " ") choose(place);
      else if (!this.move(place, event)) return;
      event.preventDefault();
    });
  }

  move({ row, column }, { key, ctrlKey }) {
    const lastRow = this.places.length - 1;
    const lastColumn = this.places[0].length - 1;
    const target = {
      ArrowUp: [row + 1, column],
      ArrowDown: [row - 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [ctrlKey ? 0 : row, 0],
      End: [ctrlKey ? lastRow : row, lastColumn],
      PageUp: [lastRow, column],
      PageDown: [0, column],
    }[key];
    if (!target) return false;
    const place = this.places[target[0]]?.[target[1]];
    if (place) this.focus(place);
    return true;
  }

  focus(place) {
    for (const each of this.places.flat()) each.element.tabIndex = each === place ? 0 : -1;
    place.element.focus();
  }
}
