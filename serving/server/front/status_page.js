"use strict";
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
      made("p", `${answer.model_name} ${answer.model_version} answered in a batch of ${spent.batch_requests} ` +
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
