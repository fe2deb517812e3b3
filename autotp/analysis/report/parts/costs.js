// Where a step's seconds go.

const costs = {
  view() {
    const all = DATA.costs;
    const total = all.reduce((sum, one) => sum + one.seconds, 0);
    const computing = all.filter((one) => one.what === "computing");
    const moving = all.filter((one) => one.what !== "computing");
    const sum = (some) => some.reduce((so_far, one) => so_far + one.seconds, 0);
    const parts = [["computing", sum(computing), "var(--compute)"],
      ["communication that is waited for", sum(moving.filter((one) => !one.hidden)), "var(--communicate)"],
      ["communication that may hide behind computing", sum(moving.filter((one) => one.hidden)), "var(--hidden)"]];
    const predicted = DATA.plan.predicted;
    return element("div", {},
      element("div.stack", {}, ...parts.map(([name, time, colour]) => element("i", { title: `${name}: ${seconds(time)}`, style: `background:${colour};width:${total ? 100 * time / total : 0}%` }))),
      element("div.legend", { style: "margin:6px 0" }, ...parts.map(([name, time, colour]) => element("span", {},
        element("i.swatch", { style: `background:${colour}` }), `${name} ${seconds(time)}`))),
      element("div.dim", {}, `Predicted step ${seconds(predicted.step_seconds)}: computing ${seconds(predicted.compute_seconds)}, exposed communication ${seconds(predicted.exposed_seconds)}.`
        + (Object.values(DATA.plan.chunks).some((each) => each > 1) ? " Below, figures are without chunks." : "")),
      element("h2", {}, "Communication"),
      table(["what moves", "collective", "axes", "times", "bytes", "time", "", ""], moving.map((one) => [one.what, one.kind, one.axes, count(one.times), bytes(one.bytes), seconds(one.seconds), percent(one.seconds, total), one.hidden ? "may hide" : "waited for"])),
      element("h2", {}, "Computing"),
      table(["operator", "times", "time", ""], computing.map((one) => [one.kind, count(one.times), seconds(one.seconds), percent(one.seconds, total)])),
      element("h2", {}, `Parameters (${count(DATA.parameters.length)})`),
      table(["parameter", "rests"], DATA.parameters.slice(0, 2000).map(([name, layout]) => [name, placed(layout)])));
  },
};
