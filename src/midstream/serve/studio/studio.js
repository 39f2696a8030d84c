// The page's frame: the server's description, the API key, the theme and the tabs.

import { find } from "./dom.js";
import * as generation from "./generation.js";
import * as scores from "./scores.js";
import { ask, key, settled } from "./server.js";
import * as steering from "./steering.js";
import * as tracing from "./tracing.js";
import * as vectors from "./vectors.js";

const THEME = "midstream-theme";
const THEMES = ["auto", "light", "dark"];

async function connect(signal) {
  try {
    const found = await ask("v1/midstream/capabilities", { signal });
    const [model] = (await ask("v1/models", { signal })).data;
    find("model").textContent = `${model.id} · ${found.num_layers} layers · ${found.dtype}`;
    find("model").className = "";
    find("key").removeAttribute("aria-invalid");
    document.title = `${model.id} · midstream studio`;
    for (const tab of [tracing, steering, scores]) tab.connected(found);
    await vectors.listSources();
    await generation.connected(model.id);
  } catch (error) {
    if (error.name === "AbortError") return;
    find("model").textContent = error.message;
    find("model").className = "error";
    if (error.param === "key") {
      find("key").setAttribute("aria-invalid", "true");
      find("key").focus();
    }
  }
}

function listenToKey() {
  const connecting = settled(connect, 300);
  find("key").value = key.get();
  find("key").addEventListener("input", () => {
    key.set(find("key").value.trim());
    connecting();
  });
}

function listenToTheme() {
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    find("theme").textContent = { auto: "◐", light: "○", dark: "●" }[theme];
    find("theme").setAttribute("aria-label", `Theme: ${theme === "auto" ? "as the system" : theme}. Change`);
    find("theme").title = find("theme").getAttribute("aria-label");
  };
  show(localStorage.getItem(THEME) ?? "auto");
  find("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, next);
    show(next);
  });
}

function listenToTabs() {
  const tabs = [...find("tabs").children];
  const open = (tab) => {
    for (const each of tabs) {
      const isOpen = each === tab;
      each.setAttribute("aria-selected", isOpen);
      each.tabIndex = isOpen ? 0 : -1;
      find(each.getAttribute("aria-controls")).hidden = !isOpen;
    }
    // Fields that several tabs have are one element, which moves to the open tab.
    for (const slot of find(tab.getAttribute("aria-controls")).querySelectorAll("[data-slot]")) slot.append(find(slot.dataset.slot));
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  };
  find("tabs").addEventListener("click", (event) => tabs.includes(event.target) && open(event.target));
  find("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
    open(next);
    next.focus();
  });
  open(tabs.find((each) => `#${each.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
}

listenToTheme();
listenToTabs();
listenToKey();
for (const each of [generation, tracing, steering, scores]) each.listen();
vectors.listen(steering.form, scores.form);
connect();
