// What every view uses: elements, numbers with units, colours of layouts, the operators as objects.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** An element: element("div.name", {title: "…"}, child, "text", …). */
function element(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  made.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style" || name.startsWith("aria") || name === "role" || name.startsWith("data-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function scaled(value, base, units) {
  if (!value) return "0";
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ${units[unit]}`;
}

const bytes = (value) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"]);
const flop = (value) => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
const seconds = (value) => value && value < 1e-6 ? `${(value * 1e9).toFixed(1)} ns` : scaled(value * 1e6, 1000, ["µs", "ms", "s"]);
const count = (value) => value.toLocaleString("en");
const several = (value, what) => `${count(value)} ${what}${value === 1 ? "" : "s"}`;
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "";

/** A light colour, always the same for one layout; grey for what every device holds whole. */
const colours = new Map();
function colourOf(layout) {
  if (!colours.has(layout)) {
    let hash = 2166136261;
    for (const letter of layout) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619) >>> 0;
    const grey = !layout || layout === "R";
    colours.set(layout, grey ? "#e4e7eb" : `hsl(${hash % 360} ${55 + hash % 30}% ${76 + hash % 9}%)`);
  }
  return colours.get(layout);
}

/** Operators as objects; `row` is what is shown of all that were decided together. */
const OPERATORS = DATA.operators.map(([name, module, row, time, communication, reads], index) => ({
  index, name, module: DATA.modules[module], row: DATA.rows[row], number: row, time, communication, reads,
}));
const STEP = OPERATORS.reduce((sum, each) => sum + each.time, 0);

/** The layout that an operator is coloured by: of its first result. */
function layoutOf(operator) {
  const { layouts, reads } = operator.row;
  return layouts[reads.length] ?? layouts[layouts.length - 1] ?? "";
}

function swatch(layout) {
  return element("i.swatch", { title: layout, style: `background:${colourOf(layout)}` });
}

function meter(time, communication, most) {
  const width = (part) => `width:${most ? Math.min(100, 100 * part / most) : 0}%`;
  return element("span.meter", { title: `${seconds(time)}, of which communicating ${seconds(communication)}` },
    element("i", { style: width(time - communication) }), element("i", { style: width(communication) }));
}
