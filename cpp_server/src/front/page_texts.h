// Generated from serving/server/front by `make page-texts`; not to be edited.
//
// What the status pages of both servers have in common.
// clang-format off
#pragma once

namespace tessera {

inline constexpr const char* kPageStyle =
R"page(/* The colours of every page and picture, light and dark. */
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1f2328; --soft: #57606a; --lines: #d8dee4; --edge: #7d8590; --band: #f4f6f8;
  --link: #0b57d0; --mark: #fdf1e8; --good: #1a7f37; --wait: #9a5b00; --bad: #b3261e;
  --blue: #0072b2; --orange: #d55e00; --green: #009e73; --purple: #cc79a7; --yellow: #b58900; --sky: #4c9ed9;
  --grey: #888888;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16191d; --ink: #e6e6e6; --soft: #a9b0b7; --lines: #3a4048; --edge: #7d8590; --band: #1f242a;
    --link: #8ab4f8; --mark: #3a2a1c; --good: #3fb950; --wait: #e3a008; --bad: #ff7b72;
    --blue: #56b4e9; --orange: #f0883e; --green: #2fc79a; --purple: #e0a3c6; --yellow: #e6c84f; --sky: #9fd0f5;
    --grey: #8b939c;
  }
}
/* How every page looks that Tessera writes or serves; no page has sizes of its own, and colours are those of
   page_colours.css. */
* { box-sizing: border-box; }
body {
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 75rem; margin: 1.5rem auto; padding: 0 clamp(.75rem, 3vw, 1.5rem); overflow-wrap: break-word;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 1.8rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
p, dd, code, figcaption { overflow-wrap: anywhere; }
a { color: var(--link); }
footer, .note { color: var(--soft); font-size: .9rem; margin: .3rem 0 .6rem; }
footer { margin-top: 2rem; border-top: 1px solid var(--lines); padding-top: .6rem; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; }
pre { background: var(--band); padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; border-radius: .4rem; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }

/* What scrolls sideways is a box of its own, never the page. */
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .92rem; }
th, td {
  padding: .3rem 1rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--lines);
  font-variant-numeric: tabular-nums;
}
th { font-weight: 600; }
.wide th, .wide td { white-space: nowrap; }
.wide td.prose { white-space: normal; min-width: 14rem; }
td.number, th.number { text-align: right; }
tr.chosen td { font-weight: 600; background: var(--mark); }

/* Facts by their names, and the figures that a reader looks for first. */
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr)); gap: .5rem 1.5rem; margin: .8rem 0; }
.facts dt { color: var(--soft); font-size: .85rem; }
.facts dd { margin: 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 10.5rem), 1fr)); gap: .7rem; margin: 1rem 0; padding: 0; list-style: none; }
.figures li { background: var(--band); border-radius: .5rem; padding: .6rem .8rem; }
.figures b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.figures span { color: var(--soft); font-size: .85rem; }

.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem; align-items: start; }
.plots > * { min-width: 0; }
.plots h2, .plots h3 { margin-top: .6rem; }
.plots svg { width: 100%; height: auto; max-width: 40rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: .4rem 0; font-size: .9rem; }
.swatch { display: inline-block; width: .85rem; height: .85rem; border-radius: .2rem; margin-right: .4rem; vertical-align: -.08rem; }

/* The servers' status page. */
.state { padding: .1rem .6rem; border-radius: .5rem; font-size: 1rem; color: var(--page); background: var(--wait); }
.state.ready { background: var(--good); }
.plot { width: 24rem; max-width: calc(100% - 1rem); height: 4rem; border-bottom: 1px solid var(--lines); margin-right: 1rem; }
.plot path { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.plot .p99, .plot .errors { stroke: var(--bad); }
.plot .p50 { stroke: var(--good); }
figure { margin: .5rem 0; }
.freshness { width: 100%; height: 4rem; background: var(--band); }
.freshness polyline { fill: none; stroke: var(--good); stroke-width: 1.5; vector-effect: non-scaling-stroke; }

/* Forms. */
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
fieldset { border: 1px solid var(--lines); border-radius: .4rem; margin: .8rem 0; padding: .4rem .8rem .8rem; min-width: 0; }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 13rem), 1fr)); gap: .5rem 1rem; }
.fields label { display: block; font-size: .85rem; color: var(--soft); overflow-wrap: anywhere; min-width: 0; }
input, select, button { font: inherit; color: inherit; background: var(--page); border: 1px solid var(--edge); border-radius: .3rem; padding: .25rem .5rem; max-width: 100%; }
.fields input { display: block; width: 100%; color: var(--ink); }
button { background: var(--link); border-color: var(--link); color: var(--page); padding: .35rem 1.1rem; cursor: pointer; }
button:disabled { opacity: .6; cursor: default; }
.refused { color: var(--bad); overflow-wrap: anywhere; }
meter { width: 8rem; }
[hidden] { display: none !important; }
)page";

inline constexpr const char* kRequestForm =
R"page(<details id="ask">
<summary>Send a request</summary>
<p class="note">One sample, of raw values as the training data had them. An empty field is a missing value, or a feature
without ids. Several values are separated by commas (<code>\,</code> is a comma within one); where ids have weights, a
value is <code>id:weight</code>, and the weight is 1 if it is left out.</p>
<form id="ask-form">
<p><label>Model <select id="ask-model"></select></label></p>
<div id="ask-features"></div>
<p><button type="submit">Send</button></p>
</form>
<div id="ask-answer" role="status" aria-live="polite"></div>
</details>
<noscript><p class="note">With JavaScript, a request can be sent from this page.</p></noscript>
)page";

inline constexpr const char* kPageScript =
R"page("use strict";
// Keeps the figures of the status page fresh and sends requests from its form. Whatever a server or a person says is
// set as text and never read as HTML. Paths are relative, so that a proxy may have the page below a prefix.
(() => {
  const REFRESH_MS = 2000;
  const STAGES = ["decode", "queue", "assemble", "transfer", "forward", "split"];
  const byId = (id) => document.getElementById(id);

  function made(tag, text, ...children) {
    const node = document.createElement(tag);
    if (text !== null) node.textContent = text;
    node.append(...children);
    return node;
  }

  function table(head, rows) {
    const body = rows.map((row) => made("tr", null, ...row.map((cell) =>
      cell instanceof Node ? made("td", null, cell) : made("td", cell))));
    const box = made("div", null, made("table", null,
      made("thead", null, made("tr", null, ...head.map((name) => made("th", name)))),
      made("tbody", null, ...body)));
    box.className = "wide";
    box.tabIndex = 0;
    return box;
  }

  // The figures: the page is asked for again, and its live parts replace those that are shown.

  async function refresh() {
    let told = "";
    try {
      if (!document.hidden) {
        const answer = await fetch(location.pathname, {cache: "no-store"});
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        show(new DOMParser().parseFromString(await answer.text(), "text/html"));
      }
    } catch (error) {
      told = `The server does not answer (${error.message}); the figures are old.`;
    }
    byId("stale").textContent = told;
    setTimeout(refresh, REFRESH_MS);
  }

  function show(fresh) {
    const boxes = () => document.querySelectorAll("[data-live] .wide");
    const scrolled = Array.from(boxes(), (box) => box.scrollLeft);
    for (const old of document.querySelectorAll("[data-live]")) {
      const now = fresh.getElementById(old.id);
      if (now) old.replaceWith(document.adoptNode(now));
    }
    boxes().forEach((box, place) => { box.scrollLeft = scrolled[place] || 0; });
    document.title = fresh.title;
    listModels();
  }

  // The form: a field for each feature of the model that is chosen.

  let features = null;  // of the model whose fields are shown: names by group
  let shown = "";       // that model

  function listModels() {
    const ready = Array.from(document.querySelectorAll("tr[data-model][data-state=ready]"));
    const paths = ready.map((row) => ["v2/models", row.dataset.model, "versions", row.dataset.version]
      .map((part, place) => place % 2 ? encodeURIComponent(part) : part).join("/"));
    const select = byId("ask-model");
    if (Array.from(select.options, (option) => option.value).join(" ") !== paths.join(" ")) {
      const chosen = select.value;
      select.replaceChildren(...ready.map((row, place) => {
        const option = made("option", `${row.dataset.model} ${row.dataset.version}`);
        option.value = paths[place];
        return option;
      }));
      if (paths.includes(chosen)) select.value = chosen;
    }
    if (byId("ask").open && select.value !== shown) showFields();
  }

  async function json(path, body) {
    const answer = await fetch(path, body === undefined ? {cache: "no-store"} :
      {method: "POST", body, headers: {"Content-Type": "application/json"}});
    const told = await answer.json();
    if (answer.ok) return told;
    const byName = answer.status === 403 && body !== undefined;
    throw new Error(told.error + (byName ? "; open this page by the server's IP address, or over TLS" : ""));
  }

  async function showFields() {
    const path = byId("ask-model").value;
    shown = path;
    features = null;
    byId("ask-features").replaceChildren();
    if (!path) return;
    try {
      const config = await json(`${path}/config`);
      if (path !== shown) return;
      features = JSON.parse(config.parameters.features.string_value);
      byId("ask-features").replaceChildren(
        ...fields("float_features", "Dense features"), ...fields("id_list_features", "Ids"),
        ...fields("id_score_list_features", "Ids with weights"));
      byId("ask-answer").replaceChildren();
    } catch (error) {
      refuse(error);
    }
  }

  function fields(group, title) {
    const names = features[group] || [];
    if (!names.length) return [];
    const inputs = names.map((name) => {
      const input = document.createElement("input");
      input.autocomplete = "off";
      input.dataset.group = group;
      return made("label", name, input);
    });
    const grid = made("div", null, ...inputs);
    grid.className = "fields";
    return [made("fieldset", null, made("legend", title), grid)];
  }

  // The texts of a group's fields, each with its feature's name.
  function given(group) {
    const inputs = document.querySelectorAll(`#ask-features input[data-group=${group}]`);
    return Array.from(inputs, (input, place) => [features[group][place], input.value]);
  }

  function number(name, text) {
    const value = Number(text);
    if (text.trim() === "" || !Number.isFinite(value)) throw new Error(`${name}: "${text}" is not a number`);
    return value;
  }

  // "a, b\, c" are "a" and "b, c".
  function values(text) {
    if (!text.trim()) return [];
    const parts = text.match(/(?:\\,|[^,])*(?:,|$)/g).slice(0, -1);
    return parts.map((part) => part.replace(/,$/, (end, at) => part[at - 1] === "\\" ? end : "")
      .replaceAll("\\,", ",").trim());
  }

  function request() {
    const inputs = [];
    const dense = given("float_features");
    if (dense.length) {
      const row = dense.map(([name, text]) => text.trim() ? number(name, text) : null);
      inputs.push({name: "float_features", datatype: "FP32", shape: [1, row.length], data: [row]});
    }
    for (const group of ["id_list_features", "id_score_list_features"]) {
      const bags = given(group).map(([name, text]) => [name, values(text)]);
      if (!bags.length) continue;
      const add = (part, datatype, data) =>
        inputs.push({name: `${group}_${part}`, datatype, shape: [data.length], data});
      add("lengths", "INT32", bags.map(([, bag]) => bag.length));
      const ids = [];
      const weights = [];
      for (const [name, bag] of bags) {
        for (const value of bag) {
          const colon = group === "id_list_features" ? -1 : value.lastIndexOf(":");
          ids.push(colon < 0 ? value : value.slice(0, colon).trim());
          weights.push(colon < 0 ? 1 : number(name, value.slice(colon + 1)));
        }
      }
      add("values", "BYTES", ids);
      if (group === "id_score_list_features") add("weights", "FP32", weights);
    }
    return {inputs, parameters: {timings: true}};
  }

  async function send(event) {
    event.preventDefault();
    if (!features) return;
    const button = event.target.querySelector("button");
    button.disabled = true;
    try {
      const asked = request();
      const began = performance.now();
      const answer = await json(`${shown}/infer`, JSON.stringify(asked));
      tell(asked, answer, performance.now() - began);
    } catch (error) {
      refuse(error);
    }
    button.disabled = false;
  }

  function tell(asked, answer, tookMs) {
    const spent = answer.parameters;
    const most = Math.max(1, ...STAGES.map((stage) => spent[`${stage}_us`]));
    const stages = STAGES.map((stage) => {
      const bar = document.createElement("meter");
      bar.max = most;
      bar.value = spent[`${stage}_us`];
      bar.textContent = "";
      return [stage, String(spent[`${stage}_us`]), bar];
    });
    const scores = answer.outputs.map((output) =>
      [output.name, output.data.map((score) => score === null ? "not finite" : String(score)).join(", ")]);
    byId("ask-answer").replaceChildren(
      made("h3", "Scores"), table(["output", "score"], scores),
      made("h3", "Where the time went"), table(["stage", "µs", ""], stages),
)page"
R"page(      made("p", `${answer.model_name} ${answer.model_version} answered in a batch of ${spent.batch_requests} ` +
        `requests and ${spent.batch_samples} samples. The browser waited ${tookMs.toFixed(1)} ms.`),
      made("details", null, made("summary", "The request as JSON"), made("pre", JSON.stringify(asked))));
  }

  function refuse(error) {
    const said = made("p", error.message);
    said.className = "refused";
    byId("ask-answer").replaceChildren(said);
  }

  byId("ask-form").addEventListener("submit", send);
  byId("ask-model").addEventListener("change", showFields);
  byId("ask").addEventListener("toggle", listModels);
  listModels();
  setTimeout(refresh, REFRESH_MS);
})();
)page";

inline constexpr const char* kPagePolicy =
    "default-src 'none'; style-src 'sha256-U+0bT6Qgjd9hLudkl3oWhbpk8Es44In1hBfJAesd5YQ='; script-src 'sha256-IDeEOXT/ywqGiVQDn0mwpYLrG3NKxR/DE5+yAAwJ+jQ='; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

}  // namespace tessera
