// Server-sent events over fetch: EventSource can't send a key.

const PAUSE_S = [1, 2, 4, 8];

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET of this router, with the key. Throws Refused. */
export async function ask(path, key, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new Refused(answer.status, said?.error?.message ?? `HTTP ${answer.status}`);
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [, name, data] = event.match(/^event: (\w+)\ndata: (.*)$/) ?? [];
      if (name) yield [name, JSON.parse(data)];
    }
  }
}

/** Follows the feed for ever. `on.event(name, data)`, `on.lost(message)` before each pause; `on.key()` is asked for
    another key when the router wants one, with what it says. */
export async function follow(path, key, on) {
  for (let failures = 0; ; ) {
    try {
      for await (const [name, data] of eventsOf(await ask(path, key))) {
        failures = 0;
        on.event(name, data);
      }
      on.lost("the router ended the connection");
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        key = await on.key(key ? error.message : "");
        continue;
      }
      on.lost(error instanceof Refused ? error.message : "the router does not answer");
    }
    const pause = PAUSE_S[Math.min(failures++, PAUSE_S.length - 1)];
    await new Promise((wake) => setTimeout(wake, pause * 1000));
  }
}
