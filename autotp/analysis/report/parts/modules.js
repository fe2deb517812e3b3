// The model's own modules as a tree, equal layers folded into one.

/** A module with its children in the order of the graph. */
class Module {
  constructor(name, path, parent) {
    Object.assign(this, { name, path, parent, children: new Map(), parts: [], operators: 0, time: 0, communication: 0, open: false, foldedParts: null });
  }

  child(name) {
    if (!this.children.has(name)) {
      const made = new Module(name, this.path ? `${this.path}.${name}` : name, this);
      this.children.set(name, made);
      this.parts.push(made);
    }
    return this.children.get(name);
  }

  add(operator) {
    this.operators += 1;
    this.time += operator.time;
    this.communication += operator.communication;
  }

  /** What this is made of: equal for layers that were decided together. */
  get signature() {
    this.known ??= this.parts.map((part) => part instanceof Module ? `(${part.name}:${part.signature})` : part.number).join(" ");
    return this.known;
  }
}

const ROOT = new Module("the model", "", null);
for (const operator of OPERATORS) {
  let at = ROOT;
  at.add(operator);
  for (const name of operator.module ? operator.module.split(".") : []) {
    at = at.child(name);
    at.add(operator);
  }
  operator.owner = at;
  at.parts.push(operator);
}
ROOT.open = true;

/** Consecutive equal layers, as one. */
class FoldedLayers {
  constructor(members) {
    const sum = (name) => members.reduce((total, each) => total + each[name], 0);
    Object.assign(this, { members, first: members[0], operators: sum("operators"), time: sum("time"), communication: sum("communication") });
    this.name = `${members[0].name} … ${members[members.length - 1].name}`;
  }
}

/** A module's parts, equal ones folded if asked for; kept, so that what is open stays open. */
function partsOf(module, folded) {
  if (!folded) return module.parts;
  if (module.foldedParts === null) {
    module.foldedParts = [];
    let run = [];
    const close = () => {
      if (run.length) module.foldedParts.push(run.length > 1 ? new FoldedLayers(run) : run[0]);
      run = [];
    };
    for (const part of module.parts) {
      const layer = part instanceof Module && /^\d+$/.test(part.name);
      if (!layer || (run.length && run[0].signature !== part.signature)) close();
      if (layer) run.push(part);
      else module.foldedParts.push(part);
    }
    close();
  }
  return module.foldedParts;
}

const inside = (part) => part instanceof FoldedLayers ? part.first : part;

class Tree {
  constructor(choose) {
    this.folded = true;
    this.list = new List((line) => this.row(line), (line) => this.click(line, choose));
    this.element = this.list.element;
    this.refresh();
  }

  lines() {
    const found = [];
    const walk = (part, depth) => {
      const holder = inside(part) instanceof Module ? inside(part) : null;
      found.push({ part, holder, depth });
      if (holder && holder.open) for (const each of partsOf(holder, this.folded)) walk(each, depth + 1);
    };
    walk(ROOT, 0);
    return found;
  }

  refresh() { this.list.set(this.lines()); }

  row({ part, holder, depth }) {
    const layout = holder ? null : layoutOf(part);
    const times = part instanceof FoldedLayers ? ` × ${part.members.length}` : "";
    return [
      element("span", { style: `flex:none;width:${depth * 14}px` }),
      element("span.twist", {}, holder ? (holder.open ? "▾" : "▸") : ""),
      layout === null ? null : swatch(layout),
      element("span.name", { title: holder ? holder.path : part.name }, part.name + times),
      element("span.grow.dim", {}, holder ? several(part.operators, "operator") : `${part.row.scheme}  ${layout}`),
      meter(part.time, part.communication, holder ? STEP : STEP / 20),
      element("span.cell.number", { style: "width:70px" }, seconds(part.time)),
    ];
  }

  click({ part, holder }, choose) {
    if (holder) {
      holder.open = !holder.open;
      this.refresh();
    }
    choose(part);
  }

  every(open) {
    const walk = (module) => {
      module.open = open || module === ROOT;
      for (const part of module.parts) if (part instanceof Module) walk(part);
    };
    walk(ROOT);
    this.refresh();
  }

  fold(folded) {
    this.folded = folded;
    this.refresh();
  }
}
