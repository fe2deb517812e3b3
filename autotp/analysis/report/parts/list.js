// A list of any length: only the rows in sight are in the document.

const HEIGHT = 24;

class List {
  /** `show(item)` makes the row's contents; `choose(item)` is called on a click; `head` stays above. */
  constructor(show, choose, head = null) {
    Object.assign(this, { show, choose, items: [], chosen: null, rows: new Map() });
    this.inner = element("div.inner");
    this.element = element("div.list", { tabIndex: 0, role: "listbox", onscroll: () => this.draw() }, head, this.inner);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(items) {
    this.items = items;
    this.inner.style.height = `${items.length * HEIGHT}px`;
    this.redraw();
  }

  /** Makes the rows in sight anew. */
  redraw() {
    this.inner.replaceChildren();
    this.rows.clear();
    this.draw();
  }

  draw() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / HEIGHT) - 10);
    const last = Math.min(this.items.length, Math.ceil((scrollTop + clientHeight) / HEIGHT) + 10);
    for (const [place, row] of this.rows) {
      if (place < first || place >= last) { row.remove(); this.rows.delete(place); }
    }
    for (let place = first; place < last; place += 1) {
      if (this.rows.has(place)) continue;
      const item = this.items[place];
      const row = element(`div.row${item === this.chosen ? ".chosen" : ""}`,
        { role: "option", style: `top:${place * HEIGHT}px`, onclick: () => this.choose(item) }, ...this.show(item));
      this.rows.set(place, row);
      this.inner.append(row);
    }
  }

  mark(item) {
    this.chosen = item;
    this.redraw();
  }
}
