// Server-sent events from the body of a fetch. EventSource can send neither a body nor an API key.

/** Yields `{name, data}` for each event of a stream of bytes, where `data` is text. Leaving the loop ends the request. */
export async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let event = { name: "message", lines: [] };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + (done ? decoder.decode() : decoder.decode(value, { stream: true }))).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line !== "") {
          read(line, event);
          continue;
        }
        if (event.lines.length) yield { name: event.name, data: event.lines.join("\n") };
        event = { name: "message", lines: [] };
      }
      if (done) return; // an event without its empty line at the end is incomplete, and dropped
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function read(line, event) {
  const [, field, value] = line.match(/^([^:]*):? ?(.*)$/s);
  if (field === "event") event.name = value;
  else if (field === "data") event.lines.push(value);
}
