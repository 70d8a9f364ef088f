"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (tag, attributes = {}, text) => {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  return e;
};
const table = (element, head, rows) => {
  element.replaceChildren();
  const h = make("tr");
  for (const c of head) h.append(make("th", {scope: "col"}, c));
  const top = make("thead");
  top.append(h);
  const body = make("tbody");
  for (const cells of rows) {
    const r = make("tr");
    cells.forEach((c, i) => r.append(i === 0 ? make("th", {scope: "row"}, c) : make("td", {}, c)));
    body.append(r);
  }
  element.append(top, body);
};
// Rows of a name, a bar of parts [[kind, value], ...] of a whole, and a number. `kinds` are [[kind, words], ...].
const barRows = (kinds, show) => {
  const words = kind => (kinds.find(k => k[0] === kind) || [kind, kind])[1];
  const there = parts => parts.filter(p => p[1] > 0);
  return (name, parts, whole, number) => {
    const bar = make("div", {class: "bar", role: "img",
      "aria-label": name + ": " + there(parts).map(p => words(p[0]) + " " + show(p[1])).join(", ")});
    for (const [kind, value] of there(parts)) {
      const s = make("span", {class: kind, title: words(kind) + ": " + show(value)});
      s.style.width = (100 * value / whole) + "%";
      bar.append(s);
    }
    const r = make("div", {class: "row"});
    r.append(make("div", {class: "name"}, name), bar, make("div", {class: "num"}, number));
    return r;
  };
};
const barLegend = (element, kinds) => {
  for (const [kind, words] of kinds) {
    const li = make("li");
    li.append(make("i", {class: kind}), words);
    element.append(li);
  }
};
