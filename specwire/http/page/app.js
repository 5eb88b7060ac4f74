// Starts the parts of the page.

import { startChat } from "./chat.js";
import { find } from "./dom.js";
import { startMonitor } from "./monitor.js";

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  find("theme").textContent = `theme: ${theme}`;
}

function startTheme() {
  let theme = THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
  setTheme(theme);
  find("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("theme", theme);
    setTheme(theme);
  });
}

startTheme();
startChat();
startMonitor();
