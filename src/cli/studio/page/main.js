// Which part of the page is shown: the fragment of the address, so that back and forward work.
function lock() {
  key = "";
  sessionStorage.removeItem("key");
  for (const section of document.querySelectorAll("section")) section.hidden = true;
  at("locked").hidden = false;
  at("key").focus();
}

let shows = 0; // The number of views that were opened: a request of an earlier one sets no timer.
async function show() {
  shows++;
  const asked = location.hash.match(/^#key=(.+)$/);
  if (asked) {
    key = decodeURIComponent(asked[1]);
    sessionStorage.setItem("key", key);
    history.replaceState(null, "", "#new");
  }
  if (!key) return lock();
  const [name, value] = location.hash.slice(1).split("=");
  const view = ["new", "runs", "run"].includes(name) ? name : "new";
  at("locked").hidden = true;
  for (const section of document.querySelectorAll("section")) section.hidden = section.id !== view;
  for (const link of document.querySelectorAll("nav a"))
    if (link.hash === "#" + view || view === "run" && link.hash === "#runs") link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  fault();
  await refresh(view, decodeURIComponent(value ?? ""));
}

// Shows the view again each second while it is open and seen.
async function refresh(view, value) {
  clearTimeout(timer);
  const mine = shows;
  let pause = 1000;
  try {
    if (view === "new") return await about();
    if (view === "runs") { await listRuns(); pause = 2000; }
    if (view === "run") { await openRun(value); pause = ended ? 5000 : 1000; }
    if (document.body.classList.contains("lost")) fault();
    document.body.classList.remove("lost");
  } catch (error) {
    document.body.classList.add("lost");
    fault(error.message);
  }
  if (key && mine === shows) timer = setTimeout(() => document.hidden ? wait(view, value) : refresh(view, value), pause);
}
function wait(view, value) {
  document.addEventListener("visibilitychange", () => refresh(view, value), { once: true });
}

let known = false;
async function about() {
  if (known) return;
  try {
    const found = await get("/api/about");
    known = true;
    at("root").textContent = found.root;
    for (const option of found.options) {
      const row = at("known").insertRow();
      row.append(make("th", option.name.replaceAll("-", "_")), make("td", option.help + (option.default ? ` [${option.default}]` : "")));
    }
  } catch (error) { fault(error.message); }
}

at("locked").onsubmit = event => {
  event.preventDefault();
  key = at("key").value.trim().replace(/^.*#key=/, "");
  sessionStorage.setItem("key", key);
  show();
};
for (const button of document.querySelectorAll("[data-browse]"))
  button.onclick = () => { target = button.dataset.browse; fault(); browse("").catch(shown); };
at("take").onclick = () => take(folder);
at("close").onclick = () => at("browser").close();
at("ask-mask").onclick = () => busy(at("ask-mask"), at("busy"), async () => {
  const { result, error } = await work("/api/mask", { options: options(), rows: 5 }, at("busy"));
  if (result) drawMask(result);
  if (error) throw new Error(error);
});
at("ask-plan").onclick = () => busy(at("ask-plan"), at("busy"), async () => {
  const { result, error } = await work("/api/plan", { options: options() }, at("busy"));
  if (result) drawPlan(result, error);
  else throw new Error(error);
});
at("form").onsubmit = event => {
  event.preventDefault();
  busy(at("start"), at("busy"), async () => {
    const { run } = await post("/api/start", { options: options() });
    location.hash = "#run=" + encodeURIComponent(run);
  });
};
at("compare").onclick = () => busy(at("compare"), at("compared"), compareRuns);
for (const [id, now] of [["stop", false], ["stop-now", true]])
  at(id).onclick = () => busy(at(id), at("working"), async () => { await post("/api/stop", { run: current, now }); }).then(showRun, shown);
at("resume").onclick = () => busy(at("resume"), at("working"), async () => {
  await post("/api/resume", { run: current });
  seen = "";
  refresh("run", current);
});
at("say").onsubmit = event => { event.preventDefault(); busy(at("send"), at("working"), say); };
at("message").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!at("send").disabled) at("say").requestSubmit(at("send"));
  }
};
at("again").onclick = () => { turns = []; at("log").replaceChildren(); at("message").focus(); };
at("unload").onclick = () => busy(at("unload"), at("working"), async () => {
  await post("/api/talk/close", {});
  loaded = "";
  at("unload").hidden = true;
});
at("to").onchange = () => { at("place").value = `${current}-${at("to").value}${/gguf/.test(at("to").value) ? ".gguf" : ""}`; };
at("give").onsubmit = event => {
  event.preventDefault();
  const button = event.submitter ?? at("give").querySelector("button");
  let place = "";
  busy(button, at("exported"), async () => { place = (await give()).output; })
    .then(() => { if (place) at("exported").textContent = "written: " + place; });
};
window.addEventListener("hashchange", show);
key = sessionStorage.getItem("key") ?? "";
show();
