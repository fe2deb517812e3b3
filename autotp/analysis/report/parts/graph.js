// What flows inside one module: its parts as boxes in ranks, tensors between them as lines.

const BOX = { width: 172, height: 44, gapX: 22, gapY: 34, most: 400 };

class ModuleGraph {
  constructor(choose, enter) {
    Object.assign(this, { choose, enter, module: null, zoom: 1 });
    this.crumbs = element("span.crumbs");
    this.said = element("span.dim");
    this.holder = element("div.graph");
    this.element = element("div", { style: "display:grid;grid-template-rows:auto minmax(0,1fr);gap:6px;min-height:0" },
      element("div.bar", {}, this.crumbs, this.said,
        element("button", { onclick: () => this.scale(1 / 1.25), title: "smaller" }, "−"),
        element("button", { onclick: () => this.scale(1.25), title: "larger" }, "+")),
      this.holder);
  }

  scale(by) {
    this.zoom = Math.min(4, Math.max(0.2, this.zoom * by));
    this.size();
  }

  size() {
    const picture = this.holder.firstChild;
    if (!picture) return;
    picture.setAttribute("width", this.width * this.zoom);
    picture.setAttribute("height", this.height * this.zoom);
  }

  show(module, folded) {
    this.module = module;
    const path = [];
    for (let at = module; at; at = at.parent) path.unshift(at);
    this.crumbs.replaceChildren(...path.flatMap((each, i) => [
      i ? " . " : "", element("button", { onclick: () => this.enter(each) }, each.name)]));
    const all = partsOf(module, folded);
    const parts = all.slice(0, BOX.most);
    this.said.textContent = all.length > parts.length
      ? `the first ${count(parts.length)} of ${count(all.length)} parts; all are under Operators` : several(all.length, "part");
    this.holder.replaceChildren(this.picture(parts));
    this.holder.scrollTop = 0;
    this.size();
  }

  /** Lines between parts: [from, to, whether a reshard is on the way]. */
  edges(parts) {
    const owner = new Map();
    const claim = (part, place) => {
      if (part instanceof FoldedLayers) part.members.forEach((each) => claim(each, place));
      else if (part instanceof Module) part.parts.forEach((each) => claim(each, place));
      else owner.set(part.index, place);
    };
    parts.forEach(claim);
    const found = new Map();
    for (const [index, place] of owner) {
      const operator = OPERATORS[index];
      for (const read of operator.reads) {
        const from = owner.get(read);
        // What comes back into a part that began earlier, as into folded layers, is not drawn: ranks have one direction.
        if (from === undefined || from >= place) continue;
        const key = from * 65536 + place;
        const moves = operator.row.reshards.some((step) => !step.gradient && step.seconds > 0 && step.tensor === OPERATORS[read].name);
        found.set(key, found.get(key) || moves);
      }
    }
    return [...found].map(([key, moves]) => [Math.floor(key / 65536), key % 65536, moves]);
  }

  picture(parts) {
    const edges = this.edges(parts);
    const rank = parts.map(() => 0);
    for (const [from, to] of [...edges].sort((a, b) => a[1] - b[1])) rank[to] = Math.max(rank[to], rank[from] + 1);
    const ranks = [];
    const put = (node) => { (ranks[node.rank] ??= []).push(node); return node; };
    const nodes = parts.map((part, i) => put({ part, rank: rank[i], width: BOX.width, before: [] }));
    const lines = edges.map(([from, to, moves]) => {
      const way = [nodes[from]];
      for (let at = rank[from] + 1; at < rank[to]; at += 1) way.push(put({ rank: at, width: 10, before: [way[way.length - 1]] }));
      nodes[to].before.push(way[way.length - 1]);
      way.push(nodes[to]);
      return { way, moves };
    });
    this.place(ranks);
    this.width = Math.max(BOX.width, ...ranks.flat().map((node) => node.x + node.width)) + 20;
    this.height = ranks.length * (BOX.height + BOX.gapY) + 20;
    const picture = drawn("svg", { viewBox: `0 0 ${this.width} ${this.height}` });
    for (const { way, moves } of lines) picture.append(drawn("path", { d: this.line(way), class: moves ? "moves" : "" }));
    for (const node of nodes) picture.append(this.box(node));
    return picture;
  }

  /** Places every rank's nodes near what they read, without overlaps. */
  place(ranks) {
    ranks.forEach((row, at) => {
      const middle = (node) => node.before.length
        ? node.before.reduce((sum, each) => sum + each.x + each.width / 2, 0) / node.before.length : 0;
      const wished = row.map((node, i) => ({ node, to: node.before.length ? middle(node) : i * (BOX.width + BOX.gapX) + BOX.width / 2 }));
      wished.sort((a, b) => a.to - b.to);
      let edge = 10;
      for (const { node, to } of wished) {
        node.x = Math.max(edge, to - node.width / 2);
        node.y = 10 + at * (BOX.height + BOX.gapY);
        edge = node.x + node.width + BOX.gapX;
      }
    });
  }

  line(way) {
    const points = [];
    way.forEach((node, i) => {
      const x = node.x + node.width / 2;
      if (i) points.push([x, node.y]);
      if (i < way.length - 1) points.push([x, node.y + BOX.height]);
    });
    let path = `M ${points[0]}`;
    for (let i = 1; i < points.length; i += 1) {
      const [x0, y0] = points[i - 1];
      const [x1, y1] = points[i];
      path += x0 === x1 ? ` L ${x1} ${y1}` : ` C ${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}`;
    }
    return path;
  }

  box({ part, x, y }) {
    const holder = inside(part) instanceof Module;
    const layout = holder ? "" : layoutOf(part);
    const name = part.name + (part instanceof FoldedLayers ? ` × ${part.members.length}` : "");
    const under = holder ? `${several(part.operators, "operator")}, ${seconds(part.time)}` : `${part.row.scheme}, ${seconds(part.time)}`;
    const cut = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
    const made = drawn("g", { class: "box", transform: `translate(${x} ${y})`, onclick: () => (holder ? this.enter(inside(part)) : this.choose(part)) },
      drawn("rect", { width: BOX.width, height: BOX.height, rx: holder ? 3 : 9, fill: holder ? "#fff" : colourOf(layout), stroke: "#7a8694" }));
    const text = (value, line, style) => {
      const said = drawn("text", { x: 8, y: line, class: style });
      said.textContent = value;
      made.append(said);
    };
    text(cut(name, 26), 18, "");
    text(cut(under, 30), 34, "under");
    const title = drawn("title");
    title.textContent = holder ? inside(part).path : `${part.name}\n${part.row.target}\n${part.row.scheme}\n${layout}`;
    made.append(title);
    return made;
  }
}
