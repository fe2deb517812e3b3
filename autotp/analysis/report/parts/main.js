// The facts above, the tabs, and what each shows; a view is made when it is first looked at.

function facts() {
  const { plan } = DATA;
  const { predicted } = plan;
  const mesh = plan.axes.map((axis, i) => `${axis} ${plan.mesh[i]}`).join(" × ") || "1 device";
  const chunks = Object.entries(plan.chunks).filter(([, each]) => each > 1).map(([kind, each]) => `${each} of ${kind}`).join(", ");
  const shown = {
    mesh, machine: DATA.machine.name, strategy: plan.strategy, mode: plan.mode,
    step: seconds(predicted.step_seconds), computing: seconds(predicted.compute_seconds),
    exposed: seconds(predicted.exposed_seconds),
    memory: bytes(predicted.memory_bytes) + (plan.allowed ? ` of ${bytes(plan.allowed)}` : ""),
    plan: plan.optimal ? "proven optimal" : `within ${(100 * plan.gap).toFixed(1)} % of the bound`,
    ...(chunks ? { chunks } : {}),
    ...(plan.constraints.length ? { pinned: plan.constraints.join("; ") } : {}),
    ...(plan.replicated.length ? { "without a rule": several(plan.replicated.length, "operator") } : {}),
  };
  document.getElementById("facts").replaceChildren(...Object.entries(shown).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function legend() {
  const times = new Map();
  for (const each of OPERATORS) times.set(layoutOf(each), (times.get(layoutOf(each)) ?? 0) + each.time);
  const most = [...times].sort((a, b) => b[1] - a[1]).slice(0, 10);
  return element("div.legend", {}, ...most.map(([layout]) => element("span", {}, swatch(layout), element("code", {}, layout))));
}

function graphView() {
  const graph = new ModuleGraph((operator) => detail.show(operator), (module) => enter(module));
  const tree = new Tree((part) => {
    const holder = inside(part);
    if (holder instanceof Module) graph.show(holder, tree.folded);
    else { tree.list.mark(null); detail.show(part); }
  });
  const enter = (module) => {
    for (let at = module; at; at = at.parent) at.open = true;
    tree.refresh();
    graph.show(module, tree.folded);
  };
  const fold = element("input", { type: "checkbox", checked: true, onchange: () => { tree.fold(fold.checked); graph.show(graph.module, fold.checked); } });
  graph.show(ROOT, true);
  return [
    element("div.bar", {}, element("label", {}, fold, " fold identical layers"),
      element("button", { onclick: () => tree.every(true), "data-does": "expand" }, "expand all"),
      element("button", { onclick: () => tree.every(false), "data-does": "collapse" }, "collapse all"), legend()),
    element("div.split", {}, tree.element, graph.element),
  ];
}

function operatorsView() {
  const operators = new Operators((operator) => detail.show(operator));
  return [operators.bar, operators.list.element];
}

const VIEWS = [
  ["Graph", true, graphView], ["Operators", true, operatorsView], ["Costs", false, () => [costs.view()]],
  ["Memory", false, () => [memory.view()]], ["Schedule", false, () => [timeline.view()]], ["Machine", false, () => [machine.view()]],
];

function open(number) {
  const [name, fixed, make] = VIEWS[number];
  const main = document.getElementById("views");
  for (const section of main.children) section.hidden = section.dataset.name !== name;
  if (![...main.children].some((section) => section.dataset.name === name)) {
    main.append(element(`section${fixed ? ".fixed" : ""}`, { "data-name": name, role: "tabpanel" }, ...make()));
  }
  document.querySelectorAll("#tabs button").forEach((button, i) => button.setAttribute("aria-selected", String(i === number)));
}

facts();
document.getElementById("tabs").replaceChildren(...VIEWS.map(([name], i) =>
  element("button", { role: "tab", "data-tab": name, onclick: () => open(i) }, name)));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") detail.hide(); });
open(0);
