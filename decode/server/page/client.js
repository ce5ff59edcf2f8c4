// What the page asks of the server, and the stream of server-sent events that it answers with.

const KEY = "d2f-api-key";

/** An answer that is an error; `status` is HTTP's, 0 where there was none. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** The list of models: [{id, d2f: {default_decoder, decoders, ...}}]. */
export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** Held-out problems: [{task, question, answer}]. */
export async function examples() {
  return await (await ask("examples")).json();
}

/** The chunks of a streamed chat completion, as they come. Aborting `signal` ends the request on the
 * server too. Throws ServerError. */
export async function* complete(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, events: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of eventData(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, response.status);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The server's own words, with its status, and when to come back where it says so. */
async function refusal(response) {
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not in OpenAI's format: from a proxy, say
  }
  const wait = response.headers.get("retry-after");
  const later = wait ? ` (try again in ${wait} s)` : "";
  return new ServerError(`${message} [${response.status}]${later}`, response.status);
}

/** The data of each event of a `text/event-stream`. */
async function* eventData(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((one) => one.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError) throw error;
    throw new ServerError("The connection was lost before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
