// The schedule as predicted: computing, and a track for each group of devices that communicates.

const TRACK = 30;
const LEFT = 110;

const timeline = {
  view() {
    const schedule = DATA.timeline;
    if (!schedule) return element("div.dim", {}, "This report has no schedule: it was made with --no-timeline, or the plan runs without one.");
    this.tracks = schedule.tracks.map(() => []);
    this.names = schedule.names;
    for (const event of schedule.events) this.tracks[event[0]].push(event);
    for (const track of this.tracks) track.sort((a, b) => a[1] - b[1]);
    this.end = Math.max(...schedule.events.map((event) => event[1] + event[2]));
    this.turn = Math.min(this.end, ...schedule.events.filter((event) => event[5]).map((event) => event[1]));
    Object.assign(this, { from: 0, to: this.end });
    this.canvas = element("canvas", { onwheel: (event) => this.wheel(event), onmousedown: (event) => this.grab(event), onmousemove: (event) => this.point(event), onmouseleave: () => this.tip.remove() });
    this.tip = element("div.tip");
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    const busy = this.tracks.map((track) => track.reduce((sum, event) => sum + event[2], 0));
    return element("div", {},
      element("div.bar", {}, element("span", {}, `${seconds(this.end)}: forward ${seconds(this.turn)}, backward ${seconds(this.end - this.turn)}`),
        element("button", { onclick: () => this.window(0, this.end) }, "all"),
        element("button", { onclick: () => this.window(0, this.turn) }, "forward"),
        element("button", { onclick: () => this.window(this.turn, this.end) }, "backward"),
        element("span.dim", {}, "Turn the wheel to zoom, drag to move.")),
      element("div", { style: "height:8px" }), this.canvas,
      element("h2", {}, "Tracks"), table(["track", "busy", "of the schedule"], schedule.tracks.map((name, i) => [this.called(name), seconds(busy[i]), percent(busy[i], this.end)])));
  },

  called(track) {
    if (track === "compute") return "computing";
    const axes = track.replace("axes ", "").split(",").map((i) => DATA.plan.axes[Number(i)] ?? i);
    return `axis ${axes.join(",")}`;
  },

  window(from, to) {
    const width = Math.max(to - from, this.end * 1e-5);
    this.from = Math.max(0, Math.min(from, this.end - width));
    this.to = Math.min(this.end, this.from + width);
    this.draw();
  },

  draw() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const height = this.tracks.length * TRACK + 22;
    if (!width) return;
    const dense = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = width * dense;
    canvas.height = height * dense;
    const pen = canvas.getContext("2d");
    pen.scale(dense, dense);
    pen.font = "11px system-ui, sans-serif";
    const scale = (width - LEFT) / (this.to - this.from);
    const at = (time) => LEFT + (time - this.from) * scale;
    this.tracks.forEach((track, i) => {
      const top = i * TRACK + 4;
      pen.fillStyle = "#1c2430";
      pen.fillText(this.called(DATA.timeline.tracks[i]), 6, top + 16);
      let last = -1;
      for (let place = this.first(track); place < track.length && track[place][1] < this.to; place += 1) {
        const [, begin, long, name, operator, backward] = track[place];
        const x = Math.max(LEFT, at(begin));
        const right = Math.min(width, at(begin + long));
        // What is thinner than a pixel is drawn once for each pixel.
        if (right < LEFT || (right - x < 1 && Math.floor(x) === last)) continue;
        last = Math.floor(x);
        pen.fillStyle = i === 0 ? (backward ? "#7fa3cd" : "#4c7fb8") : (backward ? "#e8a868" : "#d9822b");
        pen.fillRect(x, top, Math.max(1, right - x - (right - x > 3 ? 0.5 : 0)), TRACK - 8);
        if (right - x > 60) {
          pen.save();
          pen.beginPath();
          pen.rect(x, top, right - x - 4, TRACK);
          pen.clip();
          pen.fillStyle = "#fff";
          pen.fillText(this.names[i === 0 ? name : operator], x + 4, top + 15);
          pen.restore();
        }
      }
    });
    pen.fillStyle = "#667080";
    const base = this.tracks.length * TRACK;
    for (let i = 0; i <= 6; i += 1) {
      const time = this.from + (this.to - this.from) * i / 6;
      pen.textAlign = i === 6 ? "right" : i ? "center" : "left";
      pen.fillText(seconds(time), LEFT + (width - LEFT) * i / 6, base + 16);
    }
    pen.textAlign = "left";
    if (this.turn > this.from && this.turn < this.to) pen.fillRect(at(this.turn), 0, 1, base);
  },

  /** The first event that ends after the window begins. */
  first(track) {
    let low = 0;
    let high = track.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track[middle][1] + track[middle][2] < this.from) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  },

  time(event) {
    const { left, width } = this.canvas.getBoundingClientRect();
    return this.from + (this.to - this.from) * (event.clientX - left - LEFT) / (width - LEFT);
  },

  wheel(event) {
    event.preventDefault();
    const by = event.deltaY > 0 ? 1.25 : 0.8;
    const time = this.time(event);
    this.window(time - (time - this.from) * by, time + (this.to - time) * by);
  },

  grab(event) {
    const { from, to } = this;
    const width = this.canvas.clientWidth - LEFT;
    const start = event.clientX;
    const move = (next) => {
      const by = (next.clientX - start) / width * (to - from);
      this.window(from - by, to - by);
    };
    const end = () => { window.removeEventListener("mousemove", move); window.removeEventListener("mouseup", end); };
    window.addEventListener("mousemove", move);
    window.addEventListener("mouseup", end);
  },

  point(event) {
    const { top } = this.canvas.getBoundingClientRect();
    const track = this.tracks[Math.floor((event.clientY - top) / TRACK)] ?? [];
    const time = this.time(event);
    const found = track.find((each) => each[1] <= time && time <= each[1] + each[2]);
    if (!found || time < this.from) { this.tip.remove(); return; }
    this.tip.textContent = `${this.names[found[3]]}  ${this.names[found[4]]}  ${seconds(found[2])}, begins at ${seconds(found[1])}`;
    this.tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - 440)}px`;
    this.tip.style.top = `${event.clientY + 14}px`;
    document.body.append(this.tip);
  },
};
