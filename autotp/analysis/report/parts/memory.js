// What a device holds along a step, and what recomputing saves and costs.

const WIDE = 1000;
const HIGH = 260;

const memory = {
  colours: {
    parameter: "#8fa3b8", "input or buffer": "#c3ccd6", "gathered parameter": "#5f87b0", "saved for the backward pass": "#e0a458",
    "recomputed": "#c1502e", "result in use": "#f0cf9b", "gradient of a parameter": "#4f9d69", "gradient in use": "#9fd0ac", "in passing": "#b79ac8",
  },

  view() {
    const { curve, kinds, worst, held, recomputed } = DATA.memory;
    const sum = (kind) => curve[worst][3][kinds.indexOf(kind)];
    this.caption = element("div.dim", {}, "Point at the curve to see what is held there.");
    const at = curve[worst];
    return element("div.memory", {},
      element("div", {}, `At the worst moment, at the ${this.pass(at)} pass of `, element("code", {}, at[0]), `, a device holds ${bytes(DATA.memory.peak)}`
        + (DATA.plan.allowed ? ` of the ${bytes(DATA.plan.allowed)} that it may.` : ".")),
      element("div.legend", { style: "margin:6px 0" }, ...kinds.map((kind) => element("span", {},
        element("i.swatch", { style: `background:${this.colours[kind]}` }), kind))),
      this.chart(curve, kinds, worst), this.caption,
      element("h2", {}, "Held at the worst moment"),
      table(["kind", "bytes", "share"], kinds.filter(sum).sort((a, b) => sum(b) - sum(a)).map((kind) => [kind, bytes(sum(kind)), percent(sum(kind), DATA.memory.peak)])),
      element("h2", {}, "Largest"),
      table(["what", "kind", "bytes"], held.map(([kind, name, size]) => [name, kind, bytes(size)])),
      element("h2", {}, `Recomputed (${count(recomputed.length)})`),
      recomputed.length ? table(["operator", "kind", "times", "bytes held less", "at the worst moment", "work", "step longer by"],
        recomputed.map((one) => [one.name, `${one.target} in ${one.module || "the model"}`, count(one.copies), this.signed(one.saved_bytes, bytes),
          this.signed(one.peak_bytes, bytes), this.signed(one.seconds, seconds), this.signed(one.step_seconds, seconds)]))
        : element("div.dim", {}, "Nothing is recomputed in the backward pass."));
  },

  pass: (position) => (position[1] ? "backward" : "forward"),

  signed: (value, shown) => (value < 0 ? `−${shown(-value)}` : shown(value)),

  chart(curve, kinds, worst) {
    const most = Math.max(...curve.map((one) => one[2]));
    const allowed = DATA.plan.allowed && DATA.plan.allowed < 1.5 * most ? DATA.plan.allowed : 0;
    const top = 1.05 * Math.max(most, allowed);
    const step = WIDE / curve.length;
    const y = (size) => (HIGH * (1 - size / top)).toFixed(2);
    const below = curve.map(() => 0);
    const areas = kinds.map((kind, number) => {
      const points = [[], []];
      curve.forEach((one, place) => {
        const [left, right] = [(place * step).toFixed(2), ((place + 1) * step).toFixed(2)];
        points[1].unshift(`${right},${y(below[place])}`, `${left},${y(below[place])}`);
        below[place] += one[3][number];
        points[0].push(`${left},${y(below[place])}`, `${right},${y(below[place])}`);
      });
      return drawn("polygon", { points: [...points[0], ...points[1]].join(" "), fill: this.colours[kind] ?? "#999" });
    });
    const line = (x1, y1, x2, y2, colour) => drawn("line", { x1, y1, x2, y2, stroke: colour, "stroke-dasharray": "4 3" });
    const turn = curve.findIndex((one) => one[1]);
    const marks = [line((worst + 0.5) * step, 0, (worst + 0.5) * step, HIGH, "#b3261e")];
    if (turn >= 0) marks.push(line(turn * step, 0, turn * step, HIGH, "#1c2430"));
    if (allowed) marks.push(line(0, y(allowed), WIDE, y(allowed), "#b3261e"));
    const picture = drawn("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "data-curve": "memory",
      onmousemove: (event) => this.point(event, picture, curve, kinds) }, ...areas, ...marks);
    return picture;
  },

  point(event, picture, curve, kinds) {
    const { left, width } = picture.getBoundingClientRect();
    const one = curve[Math.max(0, Math.min(curve.length - 1, Math.floor(curve.length * (event.clientX - left) / width)))];
    const parts = kinds.map((kind, number) => [kind, one[3][number]]).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
    this.caption.textContent = `${this.pass(one)} pass of ${one[0]}: ${bytes(one[2])} = ${parts.map(([kind, size]) => `${kind} ${bytes(size)}`).join(" + ")}`;
  },
};
