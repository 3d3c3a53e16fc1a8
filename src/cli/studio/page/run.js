// The list of runs, and one run: its page, stop and resume, conversation, export.
let current = "", seen = "", turns = [], loaded = "", ended = false, opened = false, timer = 0;
const number = value => value === null || value === undefined ? "–" : value.toFixed(4);

async function listRuns() {
  const runs = await get("/api/runs");
  at("none").hidden = runs.length > 0;
  at("compare").hidden = runs.length < 2;
  const chosen = new Set([...document.querySelectorAll("#list input:checked")].map(box => box.value));
  const head = make("tr");
  for (const [name, less] of [[""], ["run"], ["state"], ["steps"], ["loss", 1], ["eval loss"], ["best", 1]]) head.append(make("th", name, less ? "less" : ""));
  const rows = runs.map(run => {
    const row = make("tr"), box = make("input"), link = make("a", run.run), cell = () => row.insertCell();
    Object.assign(box, { type: "checkbox", value: run.run, checked: chosen.has(run.run) });
    box.setAttribute("aria-label", "compare " + run.run);
    link.href = "#run=" + encodeURIComponent(run.run);
    cell().append(box);
    cell().append(link);
    cell().append(make("span", run.state, "state " + run.state));
    cell().append(`${run.step} of ${run.total_steps}`);
    const less = value => { const node = cell(); node.className = "less"; node.append(number(value)); };
    less(run.loss);
    cell().append(number(run.eval_loss));
    less(run.best_eval_loss);
    return row;
  });
  const focus = document.activeElement?.closest?.("#list") ? document.activeElement : null;
  // A list that is in use is not replaced under the hands of its user.
  if (!focus) at("list").replaceChildren(...(runs.length ? [head, ...rows] : []));
}

async function compareRuns() {
  const chosen = [...document.querySelectorAll("#list input:checked")].map(box => ["run", box.value]);
  const { html } = await request("/api/compare?" + new URLSearchParams(chosen)).then(answer => answer.json());
  const page = new DOMParser().parseFromString(html, "text/html");
  at("comparison").replaceChildren(...page.querySelector("main").childNodes);
  at("comparison").scrollIntoView();
}

function openRun(name) {
  if (name !== current) {
    current = name; seen = ""; turns = [];
    at("body").replaceChildren();
    at("log").replaceChildren();
    at("to").onchange();
    at("exported").textContent = at("working").textContent = "";
    at("talk").open = at("export").open = false;
    at("printed").open = opened = false;
  }
  return showRun();
}

async function showRun() {
  const name = current, first = !seen;
  const run = await get("/api/run", { run: name, seen });
  if (name !== current) return;
  ended = run.ended;
  // What is in use is not replaced under the hands of its user.
  const held = at("body").contains(document.activeElement) && !run.ended;
  if (!held) seen = run.stamp;
  if (run.html !== null && !held) {
    const main = at("body"), scrolled = main.querySelector(".events")?.scrollTop;
    const open = [...main.querySelectorAll("details[open] summary")].map(s => s.textContent);
    main.innerHTML = run.html;
    if (scrolled) main.querySelector(".events").scrollTop = scrolled;
    for (const s of main.querySelectorAll("summary")) s.parentElement.open = open.includes(s.textContent);
  }
  at("name").textContent = name;
  at("state").textContent = run.state;
  at("state").className = "state " + run.state;
  at("stop").hidden = at("stop-now").hidden = run.ended;
  at("stop").disabled = run.state === "stopping" || run.state === "finishing";
  at("stop-now").disabled = run.state === "finishing";
  at("resume").hidden = !run.saved || !["stopped", "interrupted", "failed", "halted"].includes(run.state);
  at("talk").hidden = at("export").hidden = !run.ended || !run.adapter;
  at("why").textContent = run.error ?? "";
  at("why").hidden = !run.error;
  at("printed").hidden = !run.lines;
  if (first) at("invitation").textContent = "";
  if (run.lines) {
    const text = run.lines.join("\n");
    at("command").textContent = run.command;
    if (at("lines").textContent !== text) at("lines").textContent = text;
    // Until the first step, and after a failure, the output says what happens.
    // A run of several machines prints what to type on the next one.
    const after = run.lines.slice(run.lines.findIndex(line => line.startsWith("listens on ")) + 1 || run.lines.length);
    const count = after.findIndex(line => !line.startsWith("  "));
    at("invitation").textContent = after.slice(0, count < 0 ? after.length : count).map(line => line.trim()).join("\n");
    const early = ["starting", "waiting"].includes(run.state);
    if (first && (early || run.error)) at("printed").open = opened = true;
    else if (opened && !early && !run.error) at("printed").open = opened = false;
  }
  at("invite").hidden = run.ended || !at("invitation").textContent;
  if (first) at("chat").checked = run.chat;
}

function turn(name, kind, text) {
  const node = make("div", null, "turn " + kind);
  node.append(make("b", name), text);
  return node;
}

async function answerOf(run, said, tuned, node) {
  const ask = { run, tuned, max_tokens: 256 };
  if (at("chat").checked) ask.messages = said;
  else ask.prompt = said.at(-1).content;
  let text = "";
  for await (const line of lines(await request("/api/talk", ask))) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    text += choice?.delta?.content ?? choice?.text ?? "";
    node.lastChild.textContent = text;
    at("log").scrollTop = at("log").scrollHeight;
  }
  if (!text) node.classList.add("empty");
  node.classList.add("whole");
  return text;
}

async function say() {
  // A prompt without the template is continued as it is, with its blanks.
  const text = at("chat").checked ? at("message").value.trim() : at("message").value;
  if (!text.trim()) return;
  const status = at("working"), run = current;
  if (loaded !== run) {
    const outcome = await work("/api/talk/open", { run }, status);
    if (outcome.error) throw new Error(outcome.error);
    loaded = run;
    at("unload").hidden = false;
  }
  status.textContent = "answers";
  if (run !== current) return;
  if (!at("chat").checked) turns = [];
  // The answer belongs to this conversation, whichever is shown when it comes.
  const said = turns;
  said.push({ role: "user", content: text });
  at("message").value = "";
  const pair = make("div", null, "pair"), tuned = turn("tuned", "tuned", document.createTextNode(""));
  pair.append(tuned);
  at("log").append(turn("you", "", text), pair);
  at("log").setAttribute("aria-busy", "true");
  try {
    const answer = await answerOf(run, said, true, tuned);
    if (at("beside").checked) {
      const base = turn("base", "base", document.createTextNode(""));
      pair.append(base);
      await answerOf(run, said, false, base);
    }
    said.push({ role: "assistant", content: answer });
  } catch (error) {
    said.pop();
    loaded = "";
    throw error;
  } finally { at("log").removeAttribute("aria-busy"); }
}

async function give() {
  const body = { run: current, to: at("to").value, outtype: at("outtype").value.trim(), output: at("place").value.trim() };
  const outcome = await work("/api/export", body, at("exported"));
  if (outcome.error) throw new Error(outcome.error);
  return outcome.result;
}
