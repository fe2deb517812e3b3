// The mesh on the machine: which devices an axis joins, and through which level of the interconnect.

const machine = {
  most: 512,

  view() {
    const { mesh, axes } = DATA.plan;
    this.devices = mesh.reduce((all, size) => all * size, 1);
    this.chosen = 0;
    this.axis = axes.length - 1;
    this.holder = element("div.machine");
    this.bar = element("div.bar", {}, element("span", {}, "colour by the place on axis"),
      ...axes.map((axis, i) => element("button", { onclick: () => { this.axis = i; this.draw(); } }, `${axis} (${mesh[i]})`)),
      element("span.dim", {}, "Click a device to see whom it talks with."));
    this.draw();
    return element("div", {}, this.bar, element("div", { style: "height:8px" }), this.holder,
      element("h2", {}, "Axes"), this.axes(), element("h2", {}, `Levels of ${DATA.machine.name}`), this.levels());
  },

  /** A device's place on every axis; axis 0 is the outermost. */
  place(device) {
    const found = [];
    for (let i = DATA.plan.mesh.length - 1; i >= 0; i -= 1) {
      found.unshift(device % DATA.plan.mesh[i]);
      device = Math.floor(device / DATA.plan.mesh[i]);
    }
    return found;
  },

  draw() {
    [...this.bar.querySelectorAll("button")].forEach((button, i) => { button.style.fontWeight = i === this.axis ? 700 : 400; });
    const side = 26;
    const shown = Math.min(this.devices, this.most);
    // The innermost level is a row of devices, the next a column of rows, and so on in turn.
    const build = (level, first) => {
      if (level < 0) return first < shown ? { width: side, height: side, draw: (x, y) => [this.device(first, x, y, side)] } : null;
      const { size, name } = DATA.machine.levels[level];
      const below = DATA.machine.levels.slice(0, level).reduce((all, each) => all * each.size, 1);
      const parts = [];
      for (let i = 0; i < size; i += 1) {
        const part = build(level - 1, first + i * below);
        if (part) parts.push(part);
      }
      if (!parts.length) return null;
      const most = level === 0 ? 16 : Math.max(1, Math.floor(1100 / (parts[0].width + 8)));
      const across = Math.min(parts.length, most);
      const gap = level === 0 ? 4 : 8;
      const width = across * (parts[0].width + gap) + gap;
      const height = Math.ceil(parts.length / across) * (parts[0].height + gap) + gap + 14;
      return { width, height, draw: (x, y) => {
        const label = drawn("text", { x: x + 5, y: y + 11 });
        label.textContent = name;
        return [drawn("rect", { x, y, width, height, rx: 4, fill: level % 2 ? "#f5f7f9" : "#fff", stroke: "#b7c0ca" }), label,
          ...parts.flatMap((part, i) => part.draw(x + gap + (i % across) * (part.width + gap), y + gap + 12 + Math.floor(i / across) * (part.height + gap)))];
      } };
    };
    const whole = build(DATA.machine.levels.length - 1, 0);
    const picture = drawn("svg", { width: whole.width + 2, height: whole.height + 2 }, ...whole.draw(1, 1));
    this.holder.replaceChildren(picture);
    if (shown < this.devices) this.holder.append(element("div.dim", {}, `the first ${count(shown)} of ${count(this.devices)} devices`));
  },

  device(number, x, y, side) {
    const mine = this.place(this.chosen);
    const here = this.place(number);
    const differs = here.map((at, i) => (at === mine[i] ? null : i)).filter((i) => i !== null);
    const size = DATA.plan.mesh[this.axis] ?? 1;
    const fill = `hsl(${Math.round(330 * (here[this.axis] ?? 0) / Math.max(1, size))} 60% 82%)`;
    const stroke = number === this.chosen ? "#1c2430" : differs.length === 1 ? ["#0b63c5", "#d9822b", "#2a8a4a", "#8a2a86"][differs[0]] : "#b7c0ca";
    const width = number === this.chosen || differs.length === 1 ? 2.5 : 1;
    const made = drawn("g", { class: "device", onclick: () => { this.chosen = number; this.draw(); } },
      drawn("rect", { x, y, width: side, height: side, rx: 3, fill, stroke, "stroke-width": width }));
    const label = drawn("text", { x: x + side / 2, y: y + side / 2 + 3.5, "text-anchor": "middle" });
    label.textContent = number;
    const title = drawn("title");
    title.textContent = `device ${number}: ${here.map((at, i) => `${DATA.plan.axes[i]}=${at}`).join(", ")}`;
    made.append(label, title);
    return made;
  },

  axes() {
    const { mesh, axes } = DATA.plan;
    return table(["axis", "devices", "passes through"], axes.map((axis, i) => {
      const inner = mesh.slice(i + 1).reduce((all, size) => all * size, 1);
      let group = 1;
      const passed = DATA.machine.levels.filter((level) => {
        const below = group;
        group *= level.size;
        return inner < group && inner * mesh[i] > below && mesh[i] > 1;
      });
      return [axis, count(mesh[i]), passed.map((level) => level.name).join(", ") || "nothing"];
    }));
  },

  levels() {
    return table(["level, innermost first", "groups", "bandwidth", "latency"], DATA.machine.levels.map((level) => [
      level.name, count(level.size), `${bytes(level.bandwidth)}/s`, seconds(level.latency)]));
  },
};
