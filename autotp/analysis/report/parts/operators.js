// Every operator in one table that can be searched and sorted.

const COLUMNS = [
  { name: "operator", width: 190, of: (each) => each.name },
  { name: "module", width: 230, of: (each) => each.module },
  { name: "kind", width: 170, of: (each) => each.row.target },
  { name: "scheme", width: 150, of: (each) => each.row.scheme },
  { name: "layout of its result", width: 190, of: layoutOf },
  { name: "time", width: 80, of: (each) => each.time, show: seconds },
  { name: "communicating", width: 110, of: (each) => each.communication, show: seconds },
];

class Operators {
  constructor(choose) {
    this.texts = OPERATORS.map((each) => `${each.name} ${each.module} ${each.row.target} ${each.row.scheme} ${layoutOf(each)}`.toLowerCase());
    this.order = null;
    this.head = element("div.head", {}, ...COLUMNS.map((column) => element("span.cell",
      { style: `width:${column.width}px`, title: "sort", onclick: () => this.sort(column) }, column.name)));
    this.list = new List((operator) => this.row(operator), (operator) => { this.list.mark(operator); choose(operator); }, this.head);
    const wide = COLUMNS.reduce((sum, column) => sum + column.width + 8, 16);
    for (const each of [this.head, this.list.inner]) each.style.minWidth = `${wide}px`;
    this.search = element("input", { type: "search", placeholder: "search: name, module, kind, scheme, layout", oninput: () => this.refresh() });
    this.only = element("select", { onchange: () => this.refresh() },
      ...["all", "communicating", "whole on every device"].map((each) => element("option", {}, each)));
    this.said = element("span.dim");
    this.bar = element("div.bar", {}, this.search, this.only, this.said);
    this.refresh();
  }

  sort(column) {
    this.order = this.order?.column === column && !this.order.back ? { column, back: true } : { column, back: false };
    this.refresh();
  }

  refresh() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const tests = [() => true, (each) => each.communication > 0, (each) => each.row.scheme === "replicated"];
    const test = tests[this.only.selectedIndex];
    const found = OPERATORS.filter((each) => test(each) && words.every((word) => this.texts[each.index].includes(word)));
    if (this.order) {
      const { column, back } = this.order;
      const numeric = Boolean(column.show);
      found.sort((a, b) => numeric ? column.of(b) - column.of(a) : column.of(a).localeCompare(column.of(b)));
      if (back) found.reverse();
    }
    const time = found.reduce((sum, each) => sum + each.time, 0);
    this.said.textContent = `${count(found.length)} of ${count(OPERATORS.length)} operators, ${seconds(time)}`;
    this.list.set(found);
    this.list.element.scrollTop = 0;
  }

  row(operator) {
    return COLUMNS.map((column) => {
      const value = column.of(operator);
      const cell = element(`span.cell${column.show ? ".number" : ""}`, { style: `width:${column.width}px`, title: String(value) });
      if (column.of === layoutOf) cell.append(swatch(value), " ");
      cell.append(column.show ? column.show(value) : value);
      return cell;
    });
  }
}
