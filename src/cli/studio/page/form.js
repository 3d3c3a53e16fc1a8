// One page, without libraries. The key is in the fragment of the address, which no request contains, and goes with each
// request as a header. Text from the server is shown as text; the drawing of a run is escaped where it is made.
const at = id => document.getElementById(id);
let key = "";

function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  return node;
}

function fault(line) {
  at("fault").textContent = line || "";
  at("fault").hidden = !line;
  if (line) at("fault").scrollIntoView({ block: "nearest" });
}

async function request(path, body) {
  const how = { headers: { Authorization: "Bearer " + key }, cache: "no-store" };
  if (body) Object.assign(how, { method: "POST", body: JSON.stringify(body) });
  let answer;
  try { answer = await fetch(path, how); } catch { throw new Error("finetune studio does not answer: has it ended?"); }
  if (answer.status === 401) { lock(); throw new Error("the key is missing or wrong"); }
  if (!answer.ok) {
    const line = await answer.json().then(value => value.error.message, () => answer.statusText);
    throw new Error(line);
  }
  return answer;
}

const get = (path, fields) => request(path + "?" + new URLSearchParams(fields || {})).then(answer => answer.json());
const post = (path, body) => request(path, body).then(answer => answer.json());

// The lines of an answer as they come.
async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

// A command: its progress is shown in `status`; its last line is the result.
async function work(path, body, status) {
  let last = {};
  for await (const line of lines(await request(path, body))) {
    last = JSON.parse(line);
    if (last.line) status.textContent = last.line;
  }
  if (!("result" in last) && !last.error) throw new Error("the connection was lost");
  return last;
}

// Does `act` with the button disabled; an error is shown as one line.
async function busy(button, status, act) {
  fault();
  button.disabled = true;
  status.className = "busy";
  status.textContent = "at work";
  try { await act(); status.textContent = ""; }
  catch (error) { status.textContent = ""; fault(error.message); }
  finally { button.disabled = false; status.className = ""; }
}

function options() {
  const out = {};
  for (const field of document.querySelectorAll("[data-option]")) {
    const value = field.value.trim();
    if (!value) continue;
    out[field.dataset.option] = "lines" in field.dataset ? value.split("\n").map(line => line.trim()).filter(Boolean) : value;
  }
  for (const line of at("more").value.split("\n").map(line => line.trim()).filter(Boolean)) {
    const [name, ...value] = line.split(/[:=]/);
    if (!value.length) throw new Error(`${line}: write name: value`);
    const own = name.trim().replaceAll("_", "-"), given = line.slice(name.length + 1).trim();
    if (own in out) throw new Error(`${own} is given twice`);
    out[own] = given;
  }
  return out;
}

// The folder view, a dialog: it closes with Escape, and its entries are buttons.
let target = null, folder = "";
async function browse(path) {
  const found = await get("/api/files", { path });
  folder = found.path;
  at("where").textContent = found.path || "the root folder";
  const entries = found.entries.map(entry => {
    const item = make("li"), button = make("button", (entry.folder ? "▸ " : "") + entry.name);
    button.type = "button";
    button.append(make("span", entry.kind === "folder" ? "" : entry.kind + (entry.size === null ? "" : ", " + size(entry.size))));
    const whole = (found.path ? found.path + "/" : "") + entry.name;
    button.onclick = () => entry.folder && !(target === "model" && entry.kind === "model") ? browse(whole).catch(shown) : take(whole);
    item.append(button);
    return item;
  });
  if (found.path) {
    const item = make("li"), button = make("button", "▴ up");
    button.type = "button";
    button.onclick = () => browse(found.path.split("/").slice(0, -1).join("/")).catch(shown);
    item.append(button);
    entries.unshift(item);
  }
  if (found.cut) entries.push(make("li", "Further entries are left out: type the path."));
  if (!entries.length) entries.push(make("li", "This folder is empty."));
  at("entries").replaceChildren(...entries);
  at("take").disabled = !found.path;
  if (!at("browser").open) at("browser").showModal();
  at("entries").querySelector("button")?.focus();
}
const shown = error => { at("browser").close(); fault(error.message); };

function take(path) {
  const field = at(target);
  const before = "lines" in field.dataset && field.value.trim() ? field.value.trim() + "\n" : "";
  field.value = before + path;
  at("browser").close();
  field.focus();
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let n = bytes, i = 0;
  while (n >= 1000 && i + 1 < units.length) { n /= 1000; i++; }
  return (i && n < 100 ? n.toFixed(1) : Math.round(n)) + " " + units[i];
}

function time(seconds) {
  const s = Math.round(seconds), two = n => String(n).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

function panel(title, ...parts) {
  const node = make("div", null, "panel");
  node.append(make("h2", title), ...parts);
  return node;
}

function table(rows) {
  const node = make("table");
  for (const [name, value] of rows.filter(row => row[1] !== null && row[1] !== undefined)) {
    const row = node.insertRow();
    row.append(make("th", name), make("td", value));
  }
  return node;
}

function drawMask(facts) {
  const piece = part => make(part.supervised ? "mark" : "span", part.text);
  const row = (name, pieces) => {
    const node = make("div", null, "row"), learnt = pieces.filter(p => p.supervised).reduce((n, p) => n + p.tokens, 0);
    const all = pieces.reduce((n, p) => n + p.tokens, 0);
    node.append(make("b", `${name}: ${learnt} of ${all} tokens are learnt`), ...pieces.map(piece));
    return node;
  };
  const shown = facts.rows_shown.flatMap(one => one.chosen
    ? [row(`row ${one.row}, chosen`, one.chosen), row(`row ${one.row}, rejected`, one.rejected)]
    : [row(`row ${one.row}`, one.pieces)]);
  const note = make("p", `${facts.rows} rows were read, ${facts.dropped} without anything to learn; ${facts.tokens} tokens, ` +
    `${facts.supervised ?? facts.labelled ?? 0} learnt; longest: ${facts.longest?.[0] ?? "none"}. Learnt text is marked.`, "quiet");
  const warnings = facts.warnings.map(line => make("p", line, "warn"));
  at("mask").replaceChildren(panel("What is learnt", note, ...warnings, ...shown));
}

function drawPlan(plan, error) {
  const { steps, forecast, rows, adapter } = plan;
  const known = forecast && forecast.seconds > 0;
  const facts = table([
    ["rows", `${rows.trained_on} to train on, ${plan.eval.rows} to evaluate on`],
    ["steps", `${steps.total}, ${steps.per_epoch} per epoch; ${steps.tokens} tokens`],
    ["adapter", `rank ${adapter.rank}, ${adapter.trained_values.toLocaleString("en")} trained values`],
    ["time", known ? `${time(forecast.seconds)}, ${Math.round(forecast.tokens_per_second)} tokens/s${forecast.guessed ? " (a guess)" : ""}` : "unknown until devices are measured"],
  ]);
  const devices = make("table", null, "plan");
  for (const device of plan.devices) {
    const row = devices.insertRow(), memory = device.memory_bytes, cell = make("td");
    const limit = memory?.limit;
    if (memory) {
      cell.append(`${size(memory.total)}${limit ? " of " + size(limit) : ""}`);
      if (limit) {
        const meter = make("meter");
        Object.assign(meter, { max: limit, high: limit * 0.95, value: Math.min(memory.total, limit) });
        meter.setAttribute("aria-label", "memory");
        cell.append(meter);
      }
    }
    row.append(make("th", device.name), make("td", device.fits ? "fits" : device.why_not ?? "does not fit", device.fits ? "good" : "bad"), cell);
  }
  const notes = [...plan.advice, ...plan.notes].map(line => make("p", line, "quiet"));
  const parts = [facts, devices, ...notes];
  if (error) parts.unshift(make("p", error, "fault"));
  at("plan").replaceChildren(panel("Plan", ...parts));
}
