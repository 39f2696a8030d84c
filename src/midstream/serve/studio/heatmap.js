// The figure of one site: layers as rows, the first at the bottom, tokens or heads as columns, and a cell for each pair of them. It is an
// ARIA grid: one cell takes part in the tab order, and the arrow keys move between cells.

import { paint } from "./colours.js";
import { make, number } from "./dom.js";
import { visible } from "./tokens.js";

/** Why a column without positions is void. */
export const UNALIGNED = "no token of the other prompt corresponds";

/** The mean of the numbers among these values, or null. */
export function mean(values) {
  const numbers = values.filter((value) => value !== null);
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
}

/** The cells of several pairs as one, as in `SweepResult.values`: void cells are left out. Undefined if none has come. */
function meanOf(cells) {
  const came = cells.filter(Boolean);
  if (!came.length) return undefined;
  const values = came.map(({ value }) => value).filter((value) => value !== null);
  const value = mean(values);
  const squares = values.reduce((sum, each) => sum + (each - value) ** 2, 0);
  return {
    value,
    recovered: mean(came.map(({ recovered }) => recovered)),
    void: came.every((cell) => cell.void !== null) ? came[0].void : null,
    count: values.length,
    standardError: values.length > 1 ? Math.sqrt(squares / (values.length - 1) / values.length) : null,
  };
}

/** The value on which all agree, or undefined. */
const agreed = (values) => (values.every((value) => String(value) === String(values[0])) ? values[0] : undefined);

/**
 * What the columns of a figure stand for, if a pair is shown, or the mean over the pairs (`shown` is null).
 *
 * `token`: undefined if the pairs have different ones. The label is then the position.
 * `positions`: null without a counterpart in the other prompt, undefined if the pairs have different ones.
 */
export function columnsOf({ grid, pairs, direction }, shown) {
  const numbers = shown === null ? [...pairs.keys()] : [shown];
  const columns = grid.columns.map(({ label, positions, sources }, column) => {
    const each = numbers.map((pair) => {
      const { clean, corrupt } = pairs[pair];
      const [own, other] = direction === "noising" ? [clean, corrupt] : [corrupt, clean];
      const token = (positions[pair] ?? [column]).map((at) => own[at]).join(""); // a column without a counterpart is one position
      const isChanged = positions[pair]?.some((at, i) => own[at] !== other[sources[pair][i]]) ?? false;
      return { token, positions: positions[pair], isChanged };
    });
    const token = agreed(each.map(({ token }) => token));
    const places = each.map(({ positions }) => positions).filter((positions) => positions !== null);
    const isChanged = each.some(({ isChanged }) => isChanged);
    return { label: token ?? label, token, positions: places.length ? agreed(places) : null, isChanged };
  });
  if (!grid.heads) return columns;
  return grid.heads.map((head) => ({ ...columns[0], label: `H${head}`, head, isChanged: false }));
}

/** The column of a cell, for people. */
export const nameOf = ({ label, token, head }) => {
  if (head !== undefined) return `head ${head}`;
  return token === undefined ? label : visible(label);
};

export class Heatmap {
  /**
   * `outline`: the sweep's "start". `shown`: a pair, or null for the mean over the pairs.
   * `point(place)` is called when a cell is pointed at or focused, and `choose(place)` when it is clicked or Enter is pressed.
   */
  constructor(site, outline, shown, { point, choose }) {
    const { sites, layers, heads } = outline.grid;
    const columns = columnsOf(outline, shown);
    this.site = site;
    this.outline = outline;
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
    this.isBare = isFlat || columns.length > 16; // no room for numbers
    this.grid.className = `grid${this.isBare ? " bare" : ""}${isFlat ? " flat" : isLow ? " low" : ""}`;
    for (const [row, group] of layers.entries()) this.addRow(row, group, columns.length, layers.length - row);
    this.labels = make("div", { role: "row", class: "tokens", "aria-rowindex": layers.length + 1 });
    this.grid.append(this.labels);
    this.view(shown);
    this.places[0][0].element.tabIndex = 0;
    this.listen(point, choose);
    this.element = make("figure", {}, make("figcaption", {}, site), make("div", { class: "scroll" }, this.grid));
  }

  /** `fromTop`: which row of the figure it is, from 1. */
  addRow(row, group, width, fromTop) {
    const name = group.length > 1 ? `${group[0]}–${group.at(-1)}` : String(group[0]);
    const line = make("div", { role: "row", "aria-rowindex": fromTop });
    line.append(make("span", { role: "rowheader", class: "layer", "aria-label": `layer ${name}` }, name));
    this.places.push([]);
    for (let column = 0; column < width; column++) {
      const element = make("span", { role: "gridcell", tabindex: -1, "aria-colindex": column + 2, class: "cell" });
      const place = { site: this.site, row, column, layers: group, element, cells: [] }; // the cells by pair
      element.place = place;
      this.places[row].push(place);
      line.append(element);
    }
    this.grid.prepend(line);
  }

  /** Show a pair, or the mean over the pairs if `shown` is null. */
  view(shown) {
    this.shown = shown;
    const columns = columnsOf(this.outline, shown);
    this.showLabels(columns);
    for (const place of this.places.flat()) {
      Object.assign(place, columns[place.column], { isQuiet: false });
      this.show(place);
    }
  }

  showLabels(columns) {
    const isUpright = this.isBare || columns.some(({ label }) => label.length > (columns.length > 10 ? 5 : 8));
    this.labels.classList.toggle("upright", isUpright);
    this.labels.replaceChildren(
      make("span", { role: "rowheader", class: "layer", "aria-label": "token" }),
      ...columns.map(({ label, token, positions, isChanged }, column) => {
        const kind = positions === null ? " unaligned" : isChanged ? " changed" : "";
        return make("span", { role: "columnheader", class: `label${kind}`, "aria-colindex": column + 2 }, token === undefined ? label : visible(label));
      }),
    );
  }

  /** Take a cell that has been run. Returns its place. */
  take(cell) {
    const place = this.places[cell.index[0]][cell.index[1]];
    place.cells[cell.pair] = cell;
    if (this.shown === null || this.shown === cell.pair) this.show(place);
    return place;
  }

  show(place) {
    const cell = (place.cell = this.shown === null ? meanOf(place.cells) : place.cells[this.shown]);
    const hasValue = cell && cell.void === null;
    place.element.classList.toggle("pending", !cell);
    place.element.textContent = hasValue ? number(cell.value, Math.abs(cell.value) < 9.995 ? 2 : 1) : "";
    this.describe(place);
  }

  /** Colour all cells anew. */
  recolour(scale) {
    for (const place of this.places.flat()) this.colour(place, scale);
  }

  colour({ element, cell }, scale) {
    paint(element, scale, cell?.value);
  }

  /** Mark the cells whose value is no further than `floor` from `centre`. */
  markQuiet(centre, floor) {
    for (const place of this.places.flat()) {
      const value = place.cell?.value ?? null;
      place.isQuiet = value !== null && Math.abs(value - centre) <= floor;
      this.describe(place);
    }
  }

  describe(place) {
    const { element, layers, cell, isQuiet, positions } = place;
    const where = `layer ${layers.join(", ")}, ${nameOf(place)}`;
    let value = positions === null ? `void: ${UNALIGNED}` : "not run";
    if (cell) value = cell.void !== null ? `void: ${cell.void}` : number(cell.value);
    element.setAttribute("aria-label", `${where}: ${value}${isQuiet ? ", within the noise floor" : ""}`);
    element.classList.toggle("void", positions === null || (cell?.void ?? null) !== null);
    element.classList.toggle("quiet", isQuiet);
    element.title = cell?.void ?? "";
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
