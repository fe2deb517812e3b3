// One operator explained, in the drawer at the right.

function table(headings, rows) {
  const cell = (kind, value) => value instanceof Node ? element(kind, {}, value)
    : element(/^[+−-]?[\d,.]+( |$)/.test(value) ? `${kind}.number` : kind, {}, value);
  return element("table", {}, element("thead", {}, element("tr", {}, ...headings.map((each) => element("th", {}, each)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((each) => cell("td", each))))));
}

function placed(layout) {
  return element("span", { style: "display:inline-flex;gap:5px;align-items:center" }, swatch(layout), element("code", {}, layout));
}

const detail = {
  element: document.getElementById("detail"),

  show(operator) {
    const { row } = operator;
    const parts = [
      element("button.small.close", { onclick: () => this.hide(), "aria-label": "close" }, "×"),
      element("h2", {}, operator.name),
      element("div", {}, element("code", {}, row.target), " in ", element("code", {}, operator.module || "(the model itself)")),
      row.source ? element("div.dim", {}, row.source) : null,
      row.copies > 1 ? element("div.dim", {}, `decided together with ${count(row.copies - 1)} identical operators`) : null,
      element("h2", {}, `Chosen: ${row.scheme}`),
      element("pre", {}, row.pin),
      element("div.dim", {}, "factors: ", Object.entries(row.factors).map(([name, size]) => `${name} = ${count(size)}`).join(", ") || "none"),
      this.layouts(row),
      element("h2", {}, `${seconds(row.seconds)} a step`),
      table(["", "time", ""], [["computing", row.compute_seconds], ["collectives inside", row.inner_seconds],
        ["reshards", row.reshard_seconds]].map(([what, time]) => [what, seconds(time), percent(time, row.seconds)])),
    ];
    if (Object.keys(row.values).length) {
      parts.push(element("h2", {}, "Computing"), element("pre", {}, row.expression),
        element("pre", {}, Object.entries(row.values).map(([name, value]) => `${name} = ${value.toPrecision(4)}`).join("\n")));
    }
    if (row.bound_ratio !== null) parts.push(element("div", {}, `bytes moved over the communication lower bound: ${row.bound_ratio.toFixed(2)}`));
    if (row.reshards.length) parts.push(element("h2", {}, "Reshards around it"), this.reshards(row));
    parts.push(element("h2", {}, `Other strategies (${count(row.considered)} considered)`), this.alternatives(row));
    this.element.replaceChildren(...parts.filter(Boolean));
    this.element.hidden = false;
    this.element.scrollTop = 0;
  },

  hide() { this.element.hidden = true; },

  layouts(row) {
    const reads = row.reads.length;
    return table(["", "layout"], row.layouts.map((layout, i) => [
      i < reads ? row.reads[i] : row.layouts.length - reads > 1 ? `result ${i - reads}` : "result", placed(layout)]));
  },

  reshards(row) {
    return table(["tensor", "change", "collective", "time", ""], row.reshards.map((step) => [
      (step.gradient ? "gradient of " : "") + step.tensor, step.change, `${step.kind}@${step.axes.join(",")}`,
      step.seconds ? `${step.times > 1 ? `${step.times} × ` : ""}${seconds(step.seconds)}` : "local",
      step.seconds ? `${bytes(step.bytes)}, ${step.hidden ? "hidden" : "exposed"}` : ""]));
  },

  alternatives(row) {
    if (!row.alternatives.length) return element("div.dim", {}, "No alternatives are listed.");
    return element("div", {}, element("div.dim", {}, `The step with only this changed, beside ${seconds(row.step_seconds)} (computing ${seconds(row.step_terms[0])}, moving activations ${seconds(row.step_terms[1])}, parameters ${seconds(row.step_terms[2])}); what to pin to ask for it:`),
      ...row.alternatives.map((other) => element("div", { style: "margin-top:6px" }, element("b", {}, other.scheme),
        ` ${seconds(other.in_place_seconds)} (+${percent(other.in_place_seconds - row.step_seconds, row.step_seconds)})`,
        element("div.dim", {}, `computing ${seconds(other.terms[0])}, moving activations ${seconds(other.terms[1])}, parameters ${seconds(other.terms[2])}`),
        element("pre", {}, `--pin "${other.pin}"\n${other.layouts.join("; ")}`))));
  },
};
