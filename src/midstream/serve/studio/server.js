// Requests to the server that the page came from, with the API key of this browser tab.

const KEY = "midstream-api-key";
/** Where the server is: the page is at ROOT/midstream/studio. */
export const root = new URL("..", document.baseURI);

/** An answer of the server that is an error. `param` names the field at fault, if one is known. */
export class ServerError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The API key, kept until the browser tab is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

/** The response to a request. An object as `body` is sent as JSON. Throws ServerError, and AbortError if `signal` fires. */
export async function respond(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const isFile = body instanceof Blob;
  if (body !== undefined) headers["Content-Type"] = isFile ? "application/octet-stream" : "application/json";
  const request = { method: body === undefined ? "GET" : "POST", headers, signal };
  if (body !== undefined) request.body = isFile ? body : JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, root), request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The JSON of a response. */
export async function ask(path, options) {
  return (await respond(path, options)).json();
}

async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  if ([401, 403].includes(response.status) && key.get()) {
    const { message, param } = response.status === 403 ? failure(body.error ?? body.detail ?? "", 403) : {};
    return new ServerError(["This API key was refused.", message].filter(Boolean).join(" "), response.status, param ?? "key");
  }
  if (response.status === 401) return new ServerError("The server asks for an API key.", 401, "key");
  return failure(body.error ?? body.detail, response.status);
}

/** The error in a response or in an event of a stream. */
export function failure(error, status = 0) {
  if (typeof error === "string") return new ServerError(error, status);
  if (Array.isArray(error)) return new ServerError(error[0]?.msg ?? "The request is not valid.", status, error[0]?.loc?.at(-1));
  return new ServerError(error?.message ?? `The server answered with status ${status}.`, status, error?.param ?? null);
}

/** The tokens of a text: `{ids, strings}`. */
export async function tokenize(text, { special, signal }) {
  const body = { prompt: text, add_special_tokens: special, return_token_strs: true };
  const found = await ask("tokenize", { body, signal });
  return { ids: found.tokens, strings: found.token_strs };
}

/** Calls `run(signal)` once no further call has come for a moment. A later call aborts an earlier run. */
export function settled(run, milliseconds = 180) {
  let timer, controller;
  return () => {
    clearTimeout(timer);
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    timer = setTimeout(() => run(signal).catch((error) => error.name === "AbortError" || console.warn(error)), milliseconds);
  };
}
