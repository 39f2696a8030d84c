// What is generated, in the tabs that generate text: their shared fields, and the events of a generation.

import { find, note } from "./dom.js";
import { eventsOf } from "./events.js";
import { failure, respond } from "./server.js";

let model = null;

export function listen() {
  for (const name of ["prompt", "tokens"]) find(name).addEventListener("input", () => note(name, ""));
}

/** The server is there: see whether its model can chat. A model without a chat template refuses to tokenize messages. */
export async function connected(name) {
  model = name;
  const messages = [{ role: "user", content: "Hello" }];
  const canChat = await respond("tokenize", { body: { messages } }).then(() => true, () => false);
  const chat = find("mode").querySelector("[value=chat]");
  chat.disabled = !canChat;
  if (!canChat) find("mode").value = "completion";
  find("mode").title = canChat ? "" : "The model has no chat template.";
}

/** Whether the fields are filled in. The note of one that is not says so. */
export function checkPrompt() {
  if (!find("prompt").value) note("prompt", "Enter a prompt.", "error");
}

const isChat = () => find("mode").value === "chat";

/** The text as the request's prompt, or as the first message of a chat. */
export const inputOf = (text) => (isChat() ? { messages: [{ role: "user", content: text }] } : { prompt: text });

/** A request to continue the text: `[path, body]`. */
export function requestOf(text, rest) {
  return [isChat() ? "v1/chat/completions" : "v1/completions", { model, ...inputOf(text), ...rest }];
}

/** The same, streamed, of the prompt and with the other fields of the form. */
export function streamOf(rest) {
  const sampling = { max_tokens: Number(find("tokens").value) || 64, temperature: Number(find("temperature").value) || 0 };
  return requestOf(find("prompt").value, { ...sampling, stream: true, ...rest });
}

/** Yields the events of a streamed request. Throws ServerError if one is an error. */
export async function* chunksOf([path, body], signal) {
  const response = await respond(path, { body, signal });
  for await (const { data } of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failure(chunk.error);
    yield chunk;
  }
}

/** A finish_reason in words. */
export const endOf = (reason) => (reason === "length" ? "ended at the limit of tokens" : "complete");
