// Asks for the body again whenever the run said something, at most twice a second; a page in the background waits.
const main = document.getElementById("run"), key = location.search;
let due = false, busy = false;
async function renew() {
  if (busy || document.hidden) { due = true; return; }
  busy = true; due = false;
  try {
    const answer = await fetch("body" + key);
    if (answer.ok) {
      const scrolled = main.querySelector(".events")?.scrollTop;
      const open = [...main.querySelectorAll("details[open] summary")].map(s => s.textContent);
      main.innerHTML = await answer.text();
      if (scrolled) main.querySelector(".events").scrollTop = scrolled;
      for (const s of main.querySelectorAll("summary")) s.parentElement.open = open.includes(s.textContent);
      document.body.classList.remove("lost");
    }
  } catch { document.body.classList.add("lost"); }
  setTimeout(() => { busy = false; if (due) renew(); }, 500);
}
const news = new EventSource("news" + key);
news.onmessage = renew;
news.onerror = () => document.body.classList.add("lost");
document.addEventListener("visibilitychange", () => { if (due) renew(); });
