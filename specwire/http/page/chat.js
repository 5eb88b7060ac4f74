// The conversation.

import { streamChat } from "./api.js";
import { find, make, showNumber } from "./dom.js";

const EXAMPLES = {
  "Repeat some code": "Repeat this Python class and write nothing else.\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()",
  "Explain": "Explain in a few sentences how a bicycle stays upright.",
  "Count": "Count from 1 to 40, separated by commas.",
};
const TITLES = { accepted: "accepted draft", recovered: "corrected draft", bonus: "the target's own, after accepted drafts", plain: "the target's own" };

const messages = [];
let running = null;

export function startChat() {
  for (const [name, text] of Object.entries(EXAMPLES)) {
    const button = make("button", { type: "button", class: "quiet" }, name);
    button.addEventListener("click", () => send(text));
    find("examples").append(button);
  }
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = find("prompt").value;
    if (text.trim() && !running) send(text);
  });
  find("fields").addEventListener("submit", (event) => event.preventDefault());
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      find("form").requestSubmit();
    }
  });
  find("stop").addEventListener("click", () => running?.abort());
  find("reset").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    for (const message of find("log").querySelectorAll(".message")) message.remove();
    find("welcome").hidden = false;
    find("prompt").focus();
  });
  find("colours").addEventListener("change", (event) => document.body.classList.toggle("plain-colours", !event.target.checked));
}

async function send(text) {
  if (running) return;
  const own = (running = new AbortController());
  setRunning(true);
  find("welcome").hidden = true;
  find("prompt").value = "";
  const user = { role: "user", content: text };
  messages.push(user);
  addMessage("user").text.append(text);
  const shown = addMessage("assistant");
  const answer = new Answer(shown);
  let failure = null;
  try {
    for await (const part of streamChat({ messages: conversation(), ...parameters() }, own.signal)) answer.push(part);
  } catch (error) {
    failure = own.signal.aborted ? "stopped" : error.message;
  }
  answer.end(failure, own.signal.aborted);
  // What the model is asked next has only what it has said: a refused question is forgotten, a stopped answer is kept as far as it came.
  if (messages.includes(user)) {
    if (answer.content) messages.push({ role: "assistant", content: answer.content });
    else messages.splice(messages.indexOf(user), 1);
  }
  if (running === own) {
    running = null;
    setRunning(false);
  }
}

function conversation() {
  const system = find("system").value.trim();
  return system ? [{ role: "system", content: system }, ...messages] : [...messages];
}

function parameters() {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  return {
    temperature: number("temperature"), max_tokens: number("max-tokens"), seed: number("seed"), max_draft_tokens: number("max-drafts"),
  };
}

function setRunning(isRunning) {
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
  find("log").setAttribute("aria-busy", isRunning);
}

function addMessage(role) {
  const text = make("div", { class: "text" });
  const element = make("div", { class: `message ${role}` }, text);
  find("log").append(element);
  follow(true);
  return { element, text };
}

// Keeps the newest text in sight, unless the reader has scrolled away from it.
function follow(always = false) {
  const log = find("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

class Answer {
  constructor(shown) {
    this.shown = shown;
    this.content = "";
    this.started = performance.now();
    this.first = null;
    this.numTokens = 0;
    this.speculation = null;
    this.finish = null;
  }

  push(part) {
    const choice = part.choices[0];
    if (part.usage) this.numTokens = part.usage.completion_tokens;
    if (!choice) return;
    const origins = choice.token_origins ?? [];
    if (origins.length && this.first === null) this.first = performance.now();
    this.numTokens += origins.length;
    // A last event may have text without a token: what was held back of a character.
    for (const [index, piece] of (choice.token_pieces ?? []).entries()) this.addToken(piece, origins[index] ?? "plain");
    if (choice.speculation) this.speculation = choice.speculation;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    follow();
  }

  addToken(piece, origin) {
    if (!piece) return;
    this.content += piece;
    this.shown.text.append(make("span", { class: `tok ${origin}`, title: TITLES[origin] ?? origin }, piece));
  }

  end(failure, isStopped) {
    const seconds = (performance.now() - this.started) / 1000;
    const parts = [];
    if (this.first !== null) {
      const firstMs = this.first - this.started;
      parts.push(`${this.numTokens} tokens`, `${showNumber(this.numTokens / seconds)} tokens/s`, `first after ${showNumber(firstMs, 0)} ms`);
    }
    const spec = this.speculation;
    if (spec?.num_drafts) {
      parts.push(`acceptance length ${showNumber(spec.acceptance_length, 2)}`);
      parts.push(`${spec.num_accepted_tokens} of ${spec.num_draft_tokens} drafts accepted`, `${spec.num_steps} steps`);
    } else if (spec) {
      parts.push("nothing was drafted");
    }
    if (this.finish === "length") parts.push("cut at the most tokens");
    if (isStopped) parts.push("stopped");
    if (parts.length) this.shown.element.append(make("div", { class: "stats" }, parts.join(" · ")));
    if (failure && !isStopped) this.shown.element.append(make("div", { class: "error", role: "alert" }, failure));
    follow();
  }
}
