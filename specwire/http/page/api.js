// The HTTP API as this page uses it.

import { find } from "./dom.js";

function headers() {
  const key = find("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Of a lost connection browsers say no more than "Failed to fetch" or "network error", as a TypeError.
async function say(lost, promise) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new Error(`${lost} (${error.message}); is ${location.host} still running?`) : error;
  }
}

function call(path, options) {
  return say("the service can't be reached", fetch(path, options));
}

async function check(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the service answered ${response.status}`);
  error.status = response.status;
  throw error;
}

export async function fetchStatus() {
  const response = await call("specwire/status", { headers: headers(), signal: AbortSignal.timeout(10_000) });
  return (await check(response)).json();
}

// The events of a chat completion, one object each. Throws an Error for a refusal, and for a stream that fails in the middle.
export async function* streamChat(body, signal) {
  const response = await check(
    await call("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_token_origins: true }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await say("the connection to the service broke", reader.read());
    if (done) throw new Error("the stream ended before its end");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      yield part;
    }
  }
}
